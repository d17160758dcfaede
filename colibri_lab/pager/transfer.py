"""Reads under way: what the pager asks of whoever carries them out, the system's queue or threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ..ops.types import I32
from .frames import Frames

GUESS_BYTES = 4 << 20  # of guesses under way at a time: a wrong one costs the disk all that has begun of it


class Flight(Protocol):
    """One expert's read into a run of frames: queued, then reading, then landed; or cancelled while it was queued."""

    layer: int
    expert: int
    run: int
    cancelled: bool
    early: bool  # a guess between a router's two stages

    @property
    def landed(self) -> bool:
        """Whether the read has ended, well or not (`error`)."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it has landed. PagerError names file, layer and expert."""

    def cancel(self) -> bool:
        """True when nothing was read and nothing will be."""

    def wait(self) -> None:
        """Return when the read has ended; a KeyboardInterrupt meanwhile is raised after that. Not if cancelled."""

    def publish(self) -> None:
        """Of a guess: pages that are there and those still to come go to the page table, as they arrive."""


F = TypeVar("F", bound=Flight)


class Transfer(Protocol[F]):
    """Reads of one file's experts. Called by one thread at a time; kernels may look for pages meanwhile."""

    way: str  # "queue" or "threads"
    direct: bool  # whether reads pass by the page cache (O_DIRECT)
    address: int | None  # of the C reader that kernels ask for pages; None: threads bring them

    def serve(self, frames: Frames, table: I32) -> None:
        """Once, before anything is read: where experts go, and the page table [L, E, G]. MemoryError."""

    def read(self, layer: int, expert: int, run: int) -> F:
        """What is needed now; it begins at once, or with `load` or `send`. The page table is told as pages arrive."""

    def guess(self, layer: int, expert: int, run: int) -> F:
        """What may be needed; it begins when nothing that is needed waits."""

    def load(self, flights: Sequence[F]) -> None:
        """Return when all of these `read`s have ended; then the first error, if any, is raised."""

    def send(self, flights: Sequence[F]) -> None:
        """See that all of these `read`s begin, in this order, and return at once."""

    def reading_ns(self) -> int:
        """Nanoseconds in which at least one read was under way so far, as far as that was seen."""

    def close(self) -> None:
        """Nothing is under way any more, the file is closed; idempotent."""


def guesses_at_once(expert: int) -> int:
    """How many experts of so many bytes are read ahead at a time."""
    return max(1, GUESS_BYTES // expert)


def land(flights: Sequence[Flight]) -> None:
    """Return when all have ended, since no frame may be used again before; an interrupt is raised after that."""
    interrupt: KeyboardInterrupt | None = None
    for flight in flights:
        try:
            if not flight.cancelled:
                flight.wait()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt:
        raise interrupt
