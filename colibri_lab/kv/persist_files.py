"""Plain file work of the folder of prefixes: locks that die with a process, whole reads and writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX locks: two processes on one folder may then remove each other's unfinished files
    fcntl = None  # type: ignore[assignment]

CLOSED = getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | CLOSED | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_plain(path: Path, write: bool = False) -> int:
    """A descriptor of a plain file: links are not followed, pipes not waited for. OSError."""
    fd = os.open(path, _READ | (os.O_RDWR if write else 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "is no plain file", str(path))
    return fd


def open_new(path: Path) -> int:
    """A descriptor of a file that was not there, for its owner alone. OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOSED, 0o600)


def write_whole(path: Path, data: bytes) -> None:
    """Write and sync a file under a temporary name, and rename it: there is all of it or what was there before."""
    new = path.with_name(path.name + ".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | CLOSED, 0o600)
    try:
        write_all(fd, [data], 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, path)


def read_all(fd: int, size: int, offset: int) -> bytes:
    """`size` bytes, fewer where the file ends."""
    parts = []
    while size > 0 and (part := os.pread(fd, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def write_all(fd: int, parts: Iterable[bytes | memoryview], offset: int) -> None:
    """All parts, one after the other. OSError, ENOSPC among them, leaves a part of them written."""
    left = [memoryview(part).cast("B") for part in parts]
    while left:
        done = os.pwritev(fd, left[:512], offset)
        offset += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]


def lock(fd: int) -> bool:
    """Take the file's lock, held until every copy of the descriptor is closed; False when somebody has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
