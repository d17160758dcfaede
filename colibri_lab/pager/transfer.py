"""Reads under way: each is a flight that a thread carries out, waited for together or page by page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from ..ops.types import ABSENT, COMING, I32
from .reader import ExpertFile, Reader


class Flight:
    """One expert's read: queued, then reading, then landed; or cancelled while it was queued.

    Whoever gets `_turn` first decides: a thread to read, the engine to cancel. `_landed` is held until it has ended.
    """

    __slots__ = ("_entries", "_frames", "_landed", "_pages", "_turn", "cancelled", "error", "expert", "layer", "run",
                 "target")  # fmt: skip

    def __init__(self, layer: int, expert: int, target: memoryview, run: int = -1) -> None:
        """target: whole pages, page-aligned; run: where it lies, for the caller's books."""
        self.layer, self.expert, self.target, self.run = layer, expert, target, run
        self.cancelled = False
        self.error: BaseException | None = None
        self._pages = 0
        self._entries: I32 | None = None
        self._frames: I32 | None = None
        self._turn, self._landed = threading.Lock(), threading.Lock()
        self._landed.acquire()

    @property
    def landed(self) -> bool:
        """Whether the read has ended, well or not (`error`)."""
        return not self._landed.locked()

    def cancel(self) -> bool:
        """True when nothing was read and nothing will be."""
        self.cancelled = self.cancelled or self._turn.acquire(blocking=False)
        return self.cancelled

    def wait(self) -> None:
        """Return when the read has ended; a KeyboardInterrupt meanwhile is raised after that. Not if cancelled."""
        interrupt: KeyboardInterrupt | None = None
        while not self.landed:
            try:
                if self._landed.acquire(timeout=1.0):
                    self._landed.release()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt:
            raise interrupt

    def publish(self, entries: I32, frames: I32) -> None:
        """Pages that are there and those still to come are written to the page table, entries [G], as they arrive."""
        entries[:] = COMING
        self._frames, self._entries = frames, entries
        self._tell()  # it may have arrived before: then the reader saw no entries, and this sees its pages

    def arrived(self, pages: int) -> None:
        """The first `pages` pages are in the target, and checked."""
        self._pages = pages
        self._tell()

    def _tell(self) -> None:
        entries, frames = self._entries, self._frames
        if entries is None or frames is None:
            return
        entries[: self._pages] = frames[: self._pages]  # the data was there before: a kernel that sees one may read it
        if self.error is not None:
            entries[self._pages :] = ABSENT

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


class Transfer:
    """Threads over one `Reader`. Who loads takes a share of the work, so a single miss starts no thread."""

    def __init__(self, file: ExpertFile, threads: int, piece: int | None = None) -> None:
        """piece: bytes after which pages are published, None: at the end of an expert."""
        self._reader = Reader(file, piece)
        self._most = threads
        # what is needed now never waits behind what may be needed
        self._needed, self._guessed = SimpleQueue[Flight | None](), SimpleQueue[Flight | None]()
        self._readers: list[threading.Thread] = []
        self._ahead: list[threading.Thread] = []

    @property
    def direct(self) -> bool:
        """Whether reads pass by the page cache (O_DIRECT)."""
        return self._reader.direct

    def load(self, flights: Sequence[Flight]) -> None:
        """Read all and return when every one has ended; then the first error, if any, is raised."""
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

    def send(self, flights: Sequence[Flight]) -> None:
        """Begin to read all, in this order, and return at once."""
        self._start(self._readers, min(self._most, len(flights)), "reader", self._needed)
        for flight in flights:
            self._needed.put(flight)

    def guess(self, flight: Flight) -> None:
        """Begin to read in threads that do nothing else."""
        self._start(self._ahead, min(self._most, len(self._ahead) + 1), "ahead", self._guessed)
        self._guessed.put(flight)

    def close(self) -> None:
        """Stop the threads and close the file; idempotent."""
        for threads, queue in ((self._readers, self._needed), (self._ahead, self._guessed)):
            for _ in threads:
                queue.put(None)
            for thread in threads:
                thread.join()
            threads.clear()
        self._reader.close()

    def _start(
        self, threads: list[threading.Thread], wanted: int, name: str, queue: SimpleQueue[Flight | None]
    ) -> None:
        while len(threads) < wanted:  # they hold reader and queue, not this: a forgotten engine can be collected
            thread = threading.Thread(target=_serve, args=(self._reader, queue), name=f"colibri-{name}", daemon=True)
            thread.start()
            threads.append(thread)


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


def _serve(reader: Reader, queue: SimpleQueue[Flight | None]) -> None:
    while (flight := queue.get()) is not None:
        flight.fly(reader)
