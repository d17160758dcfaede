"""Limits of this machine, measured: figures mean something only beside them."""

from __future__ import annotations

from . import isa
from .cpu import open_library, usable_processors


def read_bandwidth(threads: int = 1, mebibytes: int = 256, passes: int = 6, by_cpu: bool = True,
                   streams: int | None = None) -> float:  # fmt: skip
    """GB/s (1e9 bytes) of reading memory that is in no cache, huge pages where the system gives them, best of `passes`.

    mebibytes: size of the buffer; take several times the last-level cache where that is large and yours alone.
    by_cpu: per CPU second of the busiest thread, which other programs disturb less than the clock on the wall.
    streams: 1, line after line; 4, a line of each of four pages (4 KiB) in turn, as the kernels read; None: in turn.
    MemoryError when there is no room; ValueError for sizes below one page a thread and other numbers of streams.
    """
    if threads < 1 or mebibytes < threads or passes < 1:
        raise ValueError("threads and passes must be at least 1, mebibytes at least threads")
    if streams not in (None, 1, 4):
        raise ValueError(f"streams: 1, 4 or None for both in turn, not {streams}")
    _, library = open_library()
    rate = float(library.colibri_probe(threads, mebibytes << 20, passes, by_cpu, streams or 0))
    if rate < 0:
        raise MemoryError(f"no room for a buffer of {mebibytes} MiB")
    return rate / 1e9


def isa_levels() -> tuple[str, ...]:
    """ISA levels of the CPU kernels that this processor runs, best first."""
    return isa.available()


__all__ = ["isa_levels", "read_bandwidth", "usable_processors"]
