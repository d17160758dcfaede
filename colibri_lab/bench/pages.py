"""What it costs to touch memory again after a pause: on some virtual machines the host takes idle pages away.

A page of 4 KiB then comes back through the host, in microseconds, however fast memory is. Code that runs a few times a
second pays that for nearly every page it touches, which says nothing about the code.
"""

from __future__ import annotations

import mmap
import time

import numpy as np

PAGES, TIMES = 1000, 8
TAKEN_NS = 500.0  # a page: several times what memory and page walks take


def touch_ns(pause: float) -> tuple[float, float]:
    """Nanoseconds to read one byte of a 4 KiB page that was not touched for `pause` s, and again at once (medians)."""
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as room:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            room.madvise(mmap.MADV_NOHUGEPAGE)
        data = np.frombuffer(room, np.uint8)
        data[:] = 1
        some = data[:: mmap.PAGESIZE]
        later, again = list[float](), list[float]()
        for _ in range(TIMES):
            time.sleep(pause)
            for took in (later, again):
                begin = time.perf_counter()
                some.sum()
                took.append(1e9 * (time.perf_counter() - begin) / PAGES)
        del some, data
    return sorted(later)[TIMES // 2], sorted(again)[TIMES // 2]
