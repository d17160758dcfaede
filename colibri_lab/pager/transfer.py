"""Moving expert pages from the file into frames: one read per expert, past the page cache, checked once.

O_DIRECT where the file system has it; elsewhere plain reads whose pages are dropped from the page cache at once. Either
way the memory budget is honest: no second copy of the weights stays in memory that nobody counts.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import PagerError
from ..memory import Region
from ..ops.layout import PAGE


class ExpertFile(Protocol):
    """What the transfer needs to know of a model file."""

    path: Path

    def fileno(self) -> int: ...

    def extent(self, layer: int, expert: int) -> tuple[int, int]: ...

    def checksums(self, layer: int, expert: int) -> NDArray[np.uint32]: ...


@dataclass(frozen=True)
class Job:
    """Read one expert's pages into `target` (whole pages, page-aligned)."""

    layer: int
    expert: int
    target: memoryview


class Flight:
    """A read that nobody waits for yet: queued, then reading, then landed; or cancelled while it was queued.

    Whoever gets `_turn` first decides: a reader to read, the engine to cancel. `_landed` is held until it has ended.
    """

    __slots__ = ("_landed", "_turn", "cancelled", "error", "job", "run")

    def __init__(self, job: Job, run: int) -> None:
        """run: where the target lies, for the caller's books."""
        self.job, self.run = job, run
        self.cancelled = False
        self.error: BaseException | None = None
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

    def fly(self, reader: Reader) -> None:
        """Read, unless it was cancelled; in a reader thread."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            reader.read(self.job)
        except BaseException as error:
            self.error = error
        finally:
            self._landed.release()


class _Batch:
    """Jobs under way together: the first error is kept, `done` opens when all have ended."""

    def __init__(self, jobs: int) -> None:
        self._left = jobs
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.error: BaseException | None = None

    def ended(self, error: BaseException | None) -> None:
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if self._left == 0:
                self.done.set()


class Reader:
    """The open file and the reads from it; used by all reader threads at once."""

    def __init__(self, file: ExpertFile, verify: bool = True) -> None:
        self._file, self._verify = file, verify
        self._checked: set[tuple[int, int]] = set()
        self.direct, self._fd = _open(file)

    def read(self, job: Job) -> None:
        """One expert. PagerError names file, layer and expert."""
        where = f"{self._file.path}: layer {job.layer} expert {job.expert}"
        offset, size = self._file.extent(job.layer, job.expert)
        got = 0
        try:
            while got < size:
                read = os.preadv(self._fd, [job.target[got:size]], offset + got)
                if read == 0:
                    raise PagerError(f"{where}: the file ends {size - got} bytes too early; convert the model again")
                got += read
                if got < size and self.direct and got % PAGE:
                    got -= got % PAGE  # a direct read must go on at an aligned place
                    if read < PAGE:
                        raise PagerError(f"{where}: the file ends inside a page; convert the model again")
        except OSError as error:
            if isinstance(error, PagerError):
                raise
            raise PagerError(f"{where}: cannot be read: {error.strerror or error}") from error
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)
        if self._verify and (job.layer, job.expert) not in self._checked:
            for page, expected in enumerate(self._file.checksums(job.layer, job.expert).tolist()):
                if zlib.crc32(job.target[page * PAGE : (page + 1) * PAGE]) != expected:
                    raise PagerError(f"{where}: page {page} is damaged (its checksum differs); convert the model again")
            self._checked.add((job.layer, job.expert))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Transfer:
    """Reader threads over one `Reader`. The caller takes its share of the work; a single miss starts no thread."""

    def __init__(self, file: ExpertFile, threads: int, verify: bool = True) -> None:
        self._reader = Reader(file, verify)
        self._queue: SimpleQueue[tuple[Job, _Batch] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._most = threads - 1
        self._flights: SimpleQueue[Flight | None] = SimpleQueue()
        self._ahead: list[threading.Thread] = []

    @property
    def direct(self) -> bool:
        """Whether reads pass by the page cache (O_DIRECT)."""
        return self._reader.direct

    def load(self, jobs: Sequence[Job]) -> None:
        """Read all jobs and return when every one has ended; then the first error, if any, is raised."""
        batch = _Batch(len(jobs))
        if len(jobs) > 1 and self._most:
            while len(self._threads) < min(self._most, len(jobs) - 1):
                self._start_thread()
            for job in jobs[1:]:
                self._queue.put((job, batch))
            _run(self._reader, jobs[0], batch)
            _help(self._reader, self._queue)
        else:
            for job in jobs:
                _run(self._reader, job, batch)
        interrupt: BaseException | None = None
        while not batch.done.is_set():  # frames must not be reused while a thread still writes into them
            try:
                batch.done.wait()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt or batch.error:
            raise interrupt or batch.error  # type: ignore[misc]

    def submit(self, job: Job, run: int) -> Flight:
        """Begin to read in threads that do nothing else, so that guesses never stand before what is needed now."""
        flight = Flight(job, run)
        if len(self._ahead) <= self._most:  # as many as there are for what is needed, each started by one guess
            thread = threading.Thread(
                target=_serve_ahead, args=(self._reader, self._flights), name="colibri-ahead", daemon=True
            )
            thread.start()
            self._ahead.append(thread)
        self._flights.put(flight)
        return flight

    def close(self) -> None:
        """Stop the threads and close the file; idempotent."""
        for _ in self._threads:
            self._queue.put(None)
        for _ in self._ahead:
            self._flights.put(None)
        for thread in (*self._threads, *self._ahead):
            thread.join()
        self._threads.clear()
        self._ahead.clear()
        self._reader.close()

    def _start_thread(self) -> None:
        # The thread holds reader and queue, not this object, so that a forgotten engine can be collected.
        thread = threading.Thread(target=_serve, args=(self._reader, self._queue), name="colibri-reader", daemon=True)
        thread.start()
        self._threads.append(thread)


def _serve(reader: Reader, queue: SimpleQueue[tuple[Job, _Batch] | None]) -> None:
    while (work := queue.get()) is not None:
        _run(reader, *work)


def _serve_ahead(reader: Reader, queue: SimpleQueue[Flight | None]) -> None:
    while (flight := queue.get()) is not None:
        flight.fly(reader)


def _help(reader: Reader, queue: SimpleQueue[tuple[Job, _Batch] | None]) -> None:
    """Take queued jobs until there are none."""
    while not queue.empty():
        try:
            work = queue.get_nowait()
        except Empty:  # a reader thread was faster
            return
        if work is None:
            queue.put(None)
            return
        _run(reader, *work)


def _run(reader: Reader, job: Job, batch: _Batch) -> None:
    try:
        reader.read(job)
    except BaseException as error:
        batch.ended(error)
    else:
        batch.ended(None)


def _open(file: ExpertFile) -> tuple[bool, int]:
    """(direct, descriptor) of the very file that is open already, whatever its name stands for by now.

    O_DIRECT is tried with a real read, since some file systems take the flag and then refuse.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        try:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | flag | os.O_CLOEXEC)
        except OSError:
            fd = -1  # no such flag or no /proc here: buffered reads, below
        if fd >= 0:
            try:
                os.preadv(fd, [Region(PAGE, huge=False).data.data], 0)
                return True, fd
            except OSError:
                os.close(fd)
    fd = os.dup(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return False, fd
