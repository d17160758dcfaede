"""Reads by threads, where the system has no queue for them: whoever gets a flight first carries it out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from ..ops.types import ABSENT, COMING, I32
from .frames import Frames
from .reader import Reader
from .transfer import guesses_at_once, land


class ThreadFlight:
    """See transfer.Flight.

    Whoever gets `_turn` first decides: a thread to read, the engine to cancel. `_landed` is held until it has ended.
    """

    __slots__ = ("_entries", "_frames", "_landed", "_pages", "_told", "_turn", "cancelled", "early", "error", "expert",
                 "layer", "run", "target")  # fmt: skip

    def __init__(self, layer: int, expert: int, run: int, frames: Frames, entries: I32) -> None:
        """entries [G]: the expert's in the page table."""
        self.layer, self.expert, self.run, self.target = layer, expert, run, frames.view(run)
        self.cancelled = self.early = self._told = False
        self.error: BaseException | None = None
        self._pages = 0
        self._entries, self._frames = entries, frames.of(run)
        self._turn, self._landed = threading.Lock(), threading.Lock()
        self._landed.acquire()

    @property
    def landed(self) -> bool:
        return not self._landed.locked()

    def cancel(self) -> bool:
        self.cancelled = self.cancelled or self._turn.acquire(blocking=False)
        return self.cancelled

    def wait(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while not self.landed:
            try:
                if self._landed.acquire(timeout=1.0):
                    self._landed.release()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt:
            raise interrupt

    def publish(self) -> None:
        self._entries[:] = COMING
        self._told = True
        self._tell()  # it may have arrived before: then the reader was not to tell, and this sees its pages

    def arrived(self, pages: int) -> None:
        """The first `pages` pages are in the target, and checked."""
        self._pages = pages
        self._tell()

    def _tell(self) -> None:
        if not self._told:
            return
        self._entries[: self._pages] = self._frames[: self._pages]  # whoever sees an entry may read the page
        if self.error is not None:
            self._entries[self._pages :] = ABSENT

    def fly(self, reader: Reader) -> None:
        """Read, unless it was cancelled or another thread does."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            reader.read(self)
        except BaseException as error:
            self.error = error
            self._tell()
        finally:
            self._landed.release()


class ThreadTransfer:
    """See transfer.Transfer. Who loads takes a share of the work, so a single miss starts no thread."""

    way = "threads"
    address: int | None = None

    def __init__(self, reader: Reader, threads: int) -> None:
        self._reader, self.direct = reader, reader.direct
        self._most = threads
        # what is needed now never waits behind what may be needed
        self._needed, self._guessed = SimpleQueue[ThreadFlight | None](), SimpleQueue[ThreadFlight | None]()
        self._readers: list[threading.Thread] = []
        self._ahead: list[threading.Thread] = []

    def serve(self, frames: Frames, table: I32) -> None:
        self._frames, self._table = frames, table

    def read(self, layer: int, expert: int, run: int) -> ThreadFlight:
        flight = ThreadFlight(layer, expert, run, self._frames, self._table[layer, expert])
        flight.publish()
        return flight

    def guess(self, layer: int, expert: int, run: int) -> ThreadFlight:
        """In threads that do nothing else."""
        flight = ThreadFlight(layer, expert, run, self._frames, self._table[layer, expert])
        most = min(self._most, guesses_at_once(self._frames.run_bytes))
        self._start(self._ahead, min(most, len(self._ahead) + 1), "ahead", self._guessed)
        self._guessed.put(flight)
        return flight

    def load(self, flights: Sequence[ThreadFlight]) -> None:
        others = flights[1:] if self._most > 1 else ()
        self._start(self._readers, min(self._most - 1, len(others)), "reader", self._needed)
        for flight in others:
            self._needed.put(flight)
        for flight in flights:
            flight.fly(self._reader)
        land(flights)
        for flight in flights:
            if flight.error is not None:
                raise flight.error

    def send(self, flights: Sequence[ThreadFlight]) -> None:
        self._start(self._readers, min(self._most, len(flights)), "reader", self._needed)
        for flight in flights:
            self._needed.put(flight)

    def reading_ns(self) -> int:
        return self._reader.reading_ns()

    def close(self) -> None:
        for threads, queue in ((self._readers, self._needed), (self._ahead, self._guessed)):
            for _ in threads:
                queue.put(None)
            for thread in threads:
                thread.join()
            threads.clear()
        self._reader.close()

    def _start(
        self, threads: list[threading.Thread], wanted: int, name: str, queue: SimpleQueue[ThreadFlight | None]
    ) -> None:
        while len(threads) < wanted:  # they hold reader and queue, not this: a forgotten engine can be collected
            thread = threading.Thread(target=_serve, args=(self._reader, queue), name=f"colibri-{name}", daemon=True)
            thread.start()
            threads.append(thread)


def _serve(reader: Reader, queue: SimpleQueue[ThreadFlight | None]) -> None:
    while (flight := queue.get()) is not None:
        flight.fly(reader)
