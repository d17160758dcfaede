"""Anonymous private memory that costs nothing until it is written, and how much of it there is to have."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HUGE = 2 << 20  # bytes of a transparent huge page
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_FIXED = 0x10  # MAP_FIXED, which the module mmap does not name
_LIBC = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


class Region:
    """`size` bytes of zeroed anonymous memory, 2 MiB aligned; physical memory is used only where it was written.

    huge: ask for transparent huge pages (big weights), else never use them (sparse tables); or a range of bytes, for
    which alone they are asked.
    """

    def __init__(self, size: int, huge: bool | range) -> None:
        self.size = size
        self._map = mmap.mmap(-1, max(size, 1) + HUGE, flags=_FLAGS)
        whole = np.frombuffer(self._map, np.uint8)
        self._start = -whole.ctypes.data % HUGE
        self.data: NDArray[np.uint8] = whole[self._start : self._start + size]
        self._advise("MADV_HUGEPAGE" if huge is True else "MADV_NOHUGEPAGE", 0, len(self._map))
        if isinstance(huge, range):
            first, last = -(-huge.start // HUGE) * HUGE, huge.stop // HUGE * HUGE  # whole ones inside
            self._advise("MADV_HUGEPAGE", self._start + first, last - first)

    def _advise(self, name: str, start: int, length: int) -> None:
        advice = getattr(mmap, name, None)
        if advice is not None and length > 0:
            try:
                self._map.madvise(advice, start, length)
            except OSError:
                pass  # a kernel without transparent huge pages: only speed is lost

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """The region's first bytes as an array."""
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.data[:count].view(dtype).reshape(shape)

    def give_back(self, first: int, last: int) -> None:
        """Return the memory of bytes [first, last) to the system; they read as zero afterwards. Whole pages only."""
        page = mmap.PAGESIZE
        start = -(-(self._start + first) // page) * page
        end = (self._start + last) // page * page
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def zeros(shape: tuple[int, ...], dtype: DTypeLike, huge: bool | range = False) -> NDArray[np.generic]:
    """Like np.zeros, but always lazily backed and 64-byte aligned; huge: see Region."""
    return Region(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize, huge).array(shape, dtype)


def map_file(view: NDArray[Any], fd: int, offset: int) -> None:
    """Put bytes of a file, from `offset` on, where a view's memory is; the address stays, anonymous memory is freed.

    What is written there later is private and does not reach the file. The view must be whole pages of a `zeros` array,
    the file must hold all of its bytes as long as it is mapped; `fd` may be closed. OSError: the view is as before.
    """
    _map_over(view, mmap.MAP_PRIVATE, fd, offset)


def map_anonymous(view: NDArray[Any]) -> None:
    """Put fresh zeroed memory, lazily backed, where a file was mapped over a view. OSError: the view is as before."""
    _map_over(view, _FLAGS, -1, 0)
    advice = getattr(mmap, "MADV_NOHUGEPAGE", None)
    if _LIBC is not None and advice is not None:  # like its surroundings, so that the kernel joins them again
        _LIBC.madvise(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes), ctypes.c_int(advice))


def _map_over(view: NDArray[Any], flags: int, fd: int, offset: int) -> None:
    address, size = view.ctypes.data, view.nbytes
    if address % mmap.PAGESIZE or size % mmap.PAGESIZE or not size or not view.flags.c_contiguous:
        raise ValueError(f"{size} bytes at {address:#x} are not whole pages")
    if _LIBC is None:
        raise OSError("this system has no mmap")
    _LIBC.mmap.restype = ctypes.c_void_p
    at, length, place = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int64(offset)
    got = _LIBC.mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, fd, place)
    if got != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def free_memory(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process may still take: the machine's, or its container's where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    room = container_room(cgroups, membership)
    return free if room is None else min(free, room)


def memory_share(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Share of memory in use, 0 to 1: the machine's, or that of the fullest control group with a limit."""
    import psutil

    machine = psutil.virtual_memory()
    limits = [(int(machine.total), int(machine.available)), *container_limits(cgroups, membership)]
    return max(1 - room / limit for limit, room in limits if limit)


def container_room(cgroups: Path, membership: Path) -> int | None:
    """Bytes left under the tightest memory limit of this process's control groups; None without a limit."""
    return min((room for _, room in container_limits(cgroups, membership)), default=None)


def container_limits(cgroups: Path, membership: Path) -> list[tuple[int, int]]:
    """(bytes allowed, bytes left) of each memory limit on this process's control groups (v2 or v1).

    Page cache that the kernel would drop at once (inactive_file) does not count as used.
    """
    limits = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, used, cache = (
                cgroups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (
            folder,
            *folder.parents,
        ):  # a limit may sit on any group above; inside a container the path may not exist
            if not place.is_relative_to(root):
                break
            most, now = _text(place / limit).strip(), _text(place / used).strip()
            if most.isdigit() and now.isdigit() and int(most) < 1 << 60:
                droppable = [int(v) for k, v in map(str.split, _text(place / "memory.stat").splitlines()) if k == cache]
                limits.append((int(most), min(int(most), max(0, int(most) - int(now) + sum(droppable)))))
    return limits


def usable_cores() -> int:
    """Physical cores that this process may run on, at most the container's processor quota."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(allowed, psutil.cpu_count(logical=False) or allowed)
    quota = _text(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
