"""What every thread of a launch did on the simulator: reads, writes, barriers and warp operations, in order.

The kernels are compiled with the compiler's instrumentation for race detectors, whose functions
kernels/cuda/hostsim/sim_record.cuh gives: each access is told with its thread, array and place. Slow, and for looking.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import simulator
from .device import Device
from .launch import signatures
from .simulator import SimDriver

FLAGS = ("-O1", "-fsanitize=thread", "-DSIM_RECORD", "-nodefaultlibs", "-fno-tree-vectorize")
READ, WRITE, BARRIER, WARP = range(4)  # kinds, as in sim_record.cuh
SHARED, NO_ARRAY = 255, 254
EVENT = np.dtype([("block", "<u4"), ("at", "<u4"), ("thread", "<u2"), ("size", "<u2"), ("phase", "<u2"),
                  ("line", "<u2"), ("kind", "u1"), ("array", "u1"), ("unused", "u1", 2)])  # fmt: skip


class TooMuch(ValueError):
    """A launch did more than a recording has room for; the message says how much."""


@dataclass(frozen=True)
class Conflict:
    """Two threads that nothing orders met at one place, and one of them wrote."""

    array: str
    element: int
    block: int
    phase: int  # barriers that the block had passed
    writer: int
    other: int
    does: str  # what the other did: read or write

    def __str__(self) -> str:
        return (f"block {self.block}, after {self.phase} barriers: thread {self.writer} writes {self.array}"
                f"[{self.element}], thread {self.other} {self.does}s it, and no barrier lies between")  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """One launch. arrays, item_bytes: of the parameters that are arrays, in order; shared memory counts in 4 bytes.

    events: EVENT [N] in the order of the simulation. `array` is an index into arrays, SHARED, or NO_ARRAY for barriers
    and warp operations; `at` and `size` are bytes; `phase` is the number of barriers that the block had passed; `line`
    is that of a barrier or warp operation, 0 of an access.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    arrays: tuple[str, ...]
    item_bytes: tuple[int, ...]
    events: NDArray[np.void]

    def name(self, array: int) -> str:
        return "shared" if array == SHARED else self.arrays[array]

    def elements(self) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """Accesses, and the element of each: wide ones come once for every element."""
        events = self.events[self.events["kind"] <= WRITE]
        unit = np.full(256, 4, np.int64)
        unit[: len(self.item_bytes)] = self.item_bytes
        each = unit[events["array"]]
        count = np.maximum(events["size"] // each, 1)
        begin = np.cumsum(count) - count
        rows = np.repeat(np.arange(len(events)), count)
        return events[rows], events["at"][rows] // each[rows] + np.arange(len(rows)) - begin[rows]

    def conflicts(self) -> list[Conflict]:
        """One for each array, block and phase where warps of a block, or blocks, meet without order. Within a warp
        nothing is looked for: its lanes are ordered by its operations."""
        events, element = self.elements()
        found: dict[tuple[int, int, int], Conflict] = {}
        held: dict[tuple[int, int], list[int]] = {}
        for i, place in enumerate(zip(events["array"].tolist(), element.tolist(), strict=True)):
            held.setdefault(place, []).append(i)
        for (array, at), rows in held.items():
            met = events[rows]
            if not (met["kind"] == WRITE).any():
                continue
            for writer in met[met["kind"] == WRITE]:
                near = (met["block"] == writer["block"]) & (met["phase"] == writer["phase"])
                near &= met["thread"] // 32 != writer["thread"] // 32
                far = (met["block"] != writer["block"]) & (array != SHARED)
                if not (near | far).any():
                    continue
                key, others = (array, int(writer["block"]), int(writer["phase"])), met[near | far]
                other = others[others["thread"].argmin()]
                does = "write" if other["kind"] == WRITE else "read"
                found.setdefault(key, Conflict(self.name(array), at, *key[1:], int(writer["thread"]),
                                               int(other["thread"]), does))  # fmt: skip
        return list(found.values())


class RecordingDriver(SimDriver):
    """A simulator that keeps a Recording of each launch, of at most `most` events. TooMuch."""

    def __init__(self, order: str, seed: int, texts: Mapping[str, str] | None, most: int) -> None:
        super().__init__(order, seed, texts=texts)
        self._flags, self._most = FLAGS, most  # compiled to be looked at, not for speed
        self.recordings: list[Recording] = []

    def launch(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
               shared: int, stream: Any) -> None:  # fmt: skip
        library = self._library(file)
        named = [(p[0], a) for p, a in zip(signatures(file)[name].parameters, arguments, strict=True) if p[2]]
        ends = [(a.ctypes.data, a.ctypes.data + a.nbytes) for _, a in named]
        ranges = np.array(ends, np.uint64).reshape(-1, 2)
        events = np.zeros(self._most, EVENT)
        library.simulated_recorded.restype = c.c_ulonglong
        with simulator.one_at_a_time:
            library.simulated_record(c.c_void_p(events.ctypes.data), c.c_ulonglong(len(events)),
                                     c.c_void_p(ranges.ctypes.data), len(ranges))  # fmt: skip
            try:
                super().launch(file, name, grid, threads, arguments, shared, stream)
            finally:
                count = int(library.simulated_recorded())
                library.simulated_record(None, c.c_ulonglong(0), None, 0)
        if count > self._most:
            raise TooMuch(f"{name}: {count} events, a recording has room for {self._most}; launch fewer blocks")
        self.recordings.append(Recording(name, grid, threads, tuple(n for n, _ in named),
                                         tuple(a.itemsize for _, a in named), events[:count].copy()))  # fmt: skip


class RecordingDevice(Device):
    """A device on a RecordingDriver; order, seed and texts as of SimDriver."""

    def __init__(self, order: str = "forward", seed: int = 1, texts: Mapping[str, str] | None = None,
                 most: int = 1 << 20) -> None:  # fmt: skip
        driver = RecordingDriver(order, seed, texts, most)
        super().__init__(driver)
        self.recordings = driver.recordings
