"""Reading one expert's pages from the file into memory, past the page cache, each page checked once.

O_DIRECT where the file system has it; elsewhere plain reads whose pages are dropped from the page cache at once. Either
way the memory budget is honest: no second copy of the weights stays in memory that nobody counts.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
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


class Job(Protocol):
    """One expert's read: `target` takes its whole pages and is page-aligned."""

    layer: int
    expert: int
    target: memoryview

    def arrived(self, pages: int) -> None:
        """The first `pages` pages are in the target, and checked."""


class Reader:
    """The open file and the reads from it; used by all reader threads at once."""

    def __init__(self, file: ExpertFile, piece: int | None = None) -> None:
        """piece: bytes that one read fetches at most, whole pages; None: an expert."""
        self._file, self._piece = file, piece
        self._checked: set[tuple[int, int]] = set()
        self.direct, self._fd = _open(file)

    def read(self, job: Job) -> None:
        """One expert. PagerError names file, layer and expert."""
        where = f"{self._file.path}: layer {job.layer} expert {job.expert}"
        offset, size = self._file.extent(job.layer, job.expert)
        new = (job.layer, job.expert) not in self._checked
        expected = self._file.checksums(job.layer, job.expert).tolist() if new else ()
        for begin in range(0, size, self._piece or size):
            end = min(size, begin + (self._piece or size))
            self._fetch(job.target, offset, begin, end, where)
            for page, right in enumerate(expected[begin // PAGE : end // PAGE], begin // PAGE):
                if zlib.crc32(job.target[page * PAGE : (page + 1) * PAGE]) != right:
                    raise PagerError(f"{where}: page {page} is damaged (its checksum differs); convert the model again")
            job.arrived(end // PAGE)
        if new:
            self._checked.add((job.layer, job.expert))

    def _fetch(self, target: memoryview, offset: int, begin: int, end: int, where: str) -> None:
        """Bytes [begin, end) of the expert that starts at `offset`."""
        got = begin
        try:
            while got < end:
                read = os.preadv(self._fd, [target[got:end]], offset + got)
                if read == 0:
                    raise PagerError(f"{where}: the file ends {end - got} bytes too early; convert the model again")
                got += read
                if got < end and self.direct and got % PAGE:
                    got -= got % PAGE  # a direct read must go on at an aligned place
                    if read < PAGE:
                        raise PagerError(f"{where}: the file ends inside a page; convert the model again")
        except OSError as error:
            if isinstance(error, PagerError):
                raise
            raise PagerError(f"{where}: cannot be read: {error.strerror or error}") from error
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset + begin, end - begin, os.POSIX_FADV_DONTNEED)

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
