"""Experts on their way before anybody asked: which flights there are, and what became of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass
from typing import Any

from .frames import Frames
from .transfer import Flight, Transfer


@dataclass
class Counts:
    """What became of reads ahead. issued = hits + late + wasted + cancelled + failed, and what is still on its way."""

    issued: int = 0
    hits: int = 0  # landed before they were asked for
    late: int = 0  # asked for too early
    wasted: int = 0  # landed and never asked for
    cancelled: int = 0  # not read
    failed: int = 0  # not readable
    bytes: int = 0  # read ahead, whether it helped or not


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
        self.all, self.early = Counts(), Counts()  # early: of these, what began between a router's two stages
        self.early_useful = 0  # asked for when the read had begun, landed or not

    def issue(self, key: int, layer: int, expert: int, early: bool = False, keep: Container[int] = ()) -> bool:
        """Begin to read an expert into a free run; False when there is none that a newer guess may take. keep: keys
        whose guesses stay."""
        while len(self.flights) >= self.most or not self._frames.free:
            if not self.drop(keep=keep):
                return False
        flight = self.flights[key] = self._transfer.guess(layer, expert, self._frames.take())
        flight.early = early
        for counts in self._of(flight):
            counts.issued += 1
        return True

    def take(self, key: int) -> tuple[Flight | None, bool]:
        """The flight of an expert that is asked for now, the caller's from here on; was it a hit, looked at once."""
        flight = self.flights.pop(key, None)
        if flight is None:
            return None, False
        hit = flight.landed and flight.error is None
        for counts in self._of(flight):
            counts.hits += hit
            counts.late += not hit
        return flight, hit

    def served(self, flight: Flight) -> None:
        """A flight that was taken when its read had begun has brought what was asked for."""
        self.early_useful += flight.early
        for counts in self._of(flight):
            counts.bytes += self._frames.run_bytes

    def drop(self, wait: bool = False, keep: Container[int] = ()) -> bool:
        """Give up the oldest guess that can be given up now, or with `wait` the oldest of all once it has ended."""
        for key, flight in self.flights.items():
            if key not in keep and (flight.cancel() or flight.landed):
                self._discard(key)
                return True
        if wait and self.flights:
            key = next(iter(self.flights))
            self.flights[key].wait()
            self._discard(key)
            return True
        return False

    def cancel(self, keys: Container[int]) -> None:
        """It is known that nobody needs these because they were guessed: what is still queued is not read any more."""
        for key in [k for k, flight in self.flights.items() if k in keys and flight.cancel()]:
            self._discard(key)

    def drain(self) -> None:
        """Give up all of them; returns when no reader writes any more."""
        while self.drop(wait=True):
            continue

    def _of(self, flight: Flight) -> tuple[Counts, ...]:
        return (self.all, self.early) if flight.early else (self.all,)

    def _discard(self, key: int) -> None:
        flight = self.flights.pop(key)
        for counts in self._of(flight):
            if flight.cancelled:
                counts.cancelled += 1
            elif flight.error is not None:
                counts.failed += 1  # whoever really needs the expert reads it again and hears why
            else:
                counts.wasted += 1
                counts.bytes += self._frames.run_bytes
        if self.on_waste and not flight.cancelled and flight.error is None:
            self.on_waste(key)
        self._frames.release(flight.run)

    def counters(self) -> dict[str, int | float]:
        return {
            **{f"prefetch_{name}": n for name, n in asdict(self.all).items()},
            **{f"early_{name}": n for name, n in asdict(self.early).items()},
            "early_useful": self.early_useful,
        }
