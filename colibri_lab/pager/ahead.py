"""Experts on their way before anybody asked: which flights there are, and what became of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .frames import Frames
from .transfer import Flight, Transfer

# begun; landed before they were asked for; asked for too early; landed and never asked for; not read; not readable
PREFETCH_COUNTERS = tuple(f"prefetch_{n}" for n in ("issued", "hits", "late", "wasted", "cancelled", "failed", "bytes"))


class Ahead:
    """Speculative reads of one pager, at most `most` at a time, each with a run of frames of its own.

    Whatever the readers do, frames and counts change in the engine's thread only. An expert that has landed waits here,
    outside the page table, until it is asked for (a hit) or its frames are needed for a newer guess (wasted).
    """

    def __init__(self, frames: Frames, transfer: Transfer[Any]) -> None:
        self._frames, self._transfer = frames, transfer
        self.most = 0
        self.on_waste: Callable[[int], None] | None = None  # told the key of each guess that was read in vain
        self.flights: OrderedDict[int, Flight] = OrderedDict()  # by key, oldest guess first
        self.issued = self.hits = self.late = self.wasted = self.cancelled = self.failed = 0
        self.bytes = 0  # read ahead, whether it helped or not

    def issue(self, key: int, layer: int, expert: int) -> bool:
        """Begin to read an expert into a free run; False when there is none that a newer guess may take."""
        while len(self.flights) >= self.most or not self._frames.free:
            if not self.drop():
                return False
        self.flights[key] = self._transfer.guess(layer, expert, self._frames.take())
        self.issued += 1
        return True

    def take(self, key: int) -> tuple[Flight | None, bool]:
        """The flight of an expert that is asked for now, the caller's from here on; was it a hit, looked at once."""
        flight = self.flights.pop(key, None)
        hit = flight is not None and flight.landed and flight.error is None
        self.hits += hit
        self.late += flight is not None and not hit
        return flight, hit

    def drop(self, wait: bool = False) -> bool:
        """Give up the oldest guess that can be given up now, or with `wait` the oldest of all once it has ended."""
        for key, flight in self.flights.items():
            if flight.cancel() or flight.landed:
                self._discard(key)
                return True
        if wait and self.flights:
            key = next(iter(self.flights))
            self.flights[key].wait()
            self._discard(key)
            return True
        return False

    def cancel(self, first: int, last: int) -> None:
        """The token's need for keys in [first, last) is known: what is still queued there is not read any more."""
        for key in [k for k, flight in self.flights.items() if first <= k < last and flight.cancel()]:
            self._discard(key)

    def drain(self) -> None:
        """Give up all of them; returns when no reader writes any more."""
        while self.drop(wait=True):
            continue

    def _discard(self, key: int) -> None:
        flight = self.flights.pop(key)
        if flight.cancelled:
            self.cancelled += 1
        elif flight.error is not None:
            self.failed += 1  # whoever really needs the expert reads it again and hears why
        else:
            self.wasted += 1
            self.bytes += self._frames.run_bytes
            if self.on_waste:
                self.on_waste(key)
        self._frames.release(flight.run)

    def counters(self) -> dict[str, int | float]:
        counts = (self.issued, self.hits, self.late, self.wasted, self.cancelled, self.failed, self.bytes)
        return dict(zip(PREFETCH_COUNTERS, counts, strict=True))
