"""Reading one expert's pages from the file into memory, past the page cache, each page checked once.

O_DIRECT where the file system has it; elsewhere plain reads whose pages are dropped from the page cache at once. Either
way the memory budget is honest: no second copy of the weights stays in memory that nobody counts.
"""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import PagerError
from ..memory import Region
from ..ops.layout import PAGE

SECTOR = 4096  # direct reads begin at multiples of it


class ExpertFile(Protocol):
    """What the transfer needs to know of a model file."""

    path: Path

    def fileno(self) -> int: ...

    def extent(self, layer: int, expert: int) -> tuple[int, int]: ...

    def checksums(self, layer: int, expert: int) -> NDArray[np.uint32]: ...


class Job(Protocol):
    """One expert's read: `target` takes its whole pages and is page-aligned."""

    layer: int
    expert: int
    target: memoryview

    def arrived(self, pages: int) -> None:
        """The first `pages` pages are in the target, and checked."""


CUT, CUT_IN_PAGE, DAMAGED = -1, -2, -3  # why a read failed, where it is no errno; as in kernels/cpu/reader.c


class Reader:
    """The open file and the reads from it; used by all reader threads at once."""

    def __init__(self, file: ExpertFile, piece: int | None = None) -> None:
        """piece: bytes that one read fetches at most, whole pages; None: an expert."""
        self.file, self.piece = file, piece
        self._checked: set[tuple[int, int]] = set()
        self.direct, self._fd = _open(file)
        self._lock = threading.Lock()
        self._reading = self._since = self._busy = 0  # reads under way, since when, ns there were some before

    def fileno(self) -> int:
        """The descriptor that reads go through."""
        return self._fd

    def reading_ns(self) -> int:
        """See transfer.Transfer."""
        with self._lock:
            return self._busy + (clock() - self._since if self._reading else 0)

    def read(self, job: Job) -> None:
        """One expert. PagerError names file, layer and expert."""
        with self._lock:
            if not self._reading:
                self._since = clock()
            self._reading += 1
        try:
            self._read(job)
        finally:
            with self._lock:
                self._reading -= 1
                if not self._reading:
                    self._busy += clock() - self._since

    def _read(self, job: Job) -> None:
        offset, size = self.file.extent(job.layer, job.expert)
        new = (job.layer, job.expert) not in self._checked
        expected = self.file.checksums(job.layer, job.expert).tolist() if new else ()
        for begin in range(0, size, self.piece or size):
            end = min(size, begin + (self.piece or size))
            try:
                reason, place = self._fetch(job.target, offset, begin, end)
            except OSError as error:
                raise self.error(job.layer, job.expert, error.errno or 0, 0) from error
            for page, right in enumerate(expected[begin // PAGE : end // PAGE], begin // PAGE):
                if not reason and zlib.crc32(job.target[page * PAGE : (page + 1) * PAGE]) != right:
                    reason, place = DAMAGED, page
            if reason:
                raise self.error(job.layer, job.expert, reason, place)
            job.arrived(end // PAGE)
        if new:
            self._checked.add((job.layer, job.expert))

    def error(self, layer: int, expert: int, reason: int, place: int) -> PagerError:
        """What to say of a failed read. reason: an errno, or CUT with the bytes that are missing, CUT_IN_PAGE, or
        DAMAGED with the page."""
        what = (
            f"cannot be read: {os.strerror(reason)}"
            if reason > 0
            else {
                CUT: f"the file ends {place} bytes too early; convert the model again",
                CUT_IN_PAGE: "the file ends inside a page; convert the model again",
                DAMAGED: f"page {place} is damaged (its checksum differs); convert the model again",
            }.get(reason, "cannot be read")
        )
        return PagerError(f"{self.file.path}: layer {layer} expert {expert}: {what}")

    def _fetch(self, target: memoryview, offset: int, begin: int, end: int) -> tuple[int, int]:
        """Bytes [begin, end) of the expert that starts at `offset`. (0, 0), or why not all came; OSError."""
        got = begin
        while got < end:
            read = os.preadv(self._fd, [target[got:end]], offset + got)
            if read == 0:
                return CUT, end - got
            got += read
            if got < end and self.direct and got % SECTOR:
                if read < SECTOR:
                    return CUT_IN_PAGE, 0
                got -= got % SECTOR  # a direct read must go on at an aligned place
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset + begin, end - begin, os.POSIX_FADV_DONTNEED)
        return 0, 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
