"""A lock between processes, held through an open file: a process that dies lets go of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # no POSIX locks on this system: renames still keep files whole, work may be done twice
    fcntl = None  # type: ignore[assignment]


class Lock:
    """`with Lock(path):` waits until no other process holds it. The file stays; its content means nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, -1

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock; False when `wait` is False and somebody holds it. OSError when the file cannot be made."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        if fcntl is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(fd)
                return False
            except BaseException:
                os.close(fd)
                raise
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def locked_elsewhere(path: Path) -> bool:
    """Does a living process hold the lock at `path`? A lock file that is not there is held by nobody."""
    if not path.exists():
        return False
    lock = Lock(path)
    try:
        got = lock.acquire(wait=False)
    except OSError:
        return True
    lock.release()
    return not got
