"""What the disk gives: experts of a model in random order, read as the engine reads them, into memory that is cold.

An engine's frames are many times what a cache holds. Reading again and again into a few that are hot is a tenth to a
fifth faster, where a host copies what a guest reads.
"""

from __future__ import annotations

import random
import statistics
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np

from colibri_lab.model.store import ModelFile
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.types import ABSENT
from colibri_lab.pager.frames import Frames
from colibri_lab.pager.reading import open_transfer

DEPTH = 4  # reads under way at most
COLD = 512 << 20  # bytes of frames that are used in turn


class Disk:
    """One file's experts; the first time each is checked (`warm` does it)."""

    def __init__(self, path: str | Path) -> None:
        self._file = file = ModelFile.open(Path(path))
        self._sparse = [layer for layer, sparse in enumerate(file.spec.sparse) if sparse]
        most = max(DEPTH, min(len(self._sparse) * file.spec.experts, COLD // (file.expert_pages * PAGE)))
        self.frames = Frames(file.expert_pages, most, most)
        self._transfer = open_transfer(file, DEPTH, None, kernels=True)
        shape = file.spec.layers, file.spec.experts, file.expert_pages
        self._transfer.serve(self.frames, np.full(shape, ABSENT, np.int32))
        self._dice, self._next = random.Random(0), 0

    def read(self, experts: int) -> tuple[float, float]:
        """So many together, at most DEPTH. Seconds until they are asked for, until they are there."""
        dice, chosen = self._dice, self._file.spec.experts
        return self._load([(dice.choice(self._sparse), dice.randrange(chosen)) for _ in range(experts)])

    def warm(self) -> None:
        """Read every expert once."""
        for layer in self._sparse:
            for expert in range(self._file.spec.experts):
                self._load([(layer, expert)])

    def rate(self, together: int, seconds: float) -> float:
        """Bytes a second, so many experts together, over at least so many seconds."""
        done, spent = 0, 0.0
        while spent < seconds:
            spent += self.read(together)[1]
            done += together * self.frames.run_bytes
        return done / spent

    def _load(self, keys: list[tuple[int, int]]) -> tuple[float, float]:
        begin, flights = perf_counter(), []
        for layer, expert in keys:
            flights.append(self._transfer.read(layer, expert, self._next))
            self._next = (self._next + 1) % self.frames.most
        asked = perf_counter()
        self._transfer.load(flights)
        return asked - begin, perf_counter() - begin

    def close(self) -> None:
        self._transfer.close()
        self._file.close()


def disk_rate(path: str | Path, seconds: float = 1.0) -> float:
    """Bytes a second, four experts at a time."""
    with closing(Disk(path)) as disk:
        disk.rate(DEPTH, seconds)  # frames are there, and experts checked, for the most part
        return disk.rate(DEPTH, seconds)


def disk_delay(path: str | Path, times: int = 200) -> tuple[float, float]:
    """Median seconds that asking for one expert takes, and until it is there."""
    with closing(Disk(path)) as disk:
        asked, there = zip(*(disk.read(1) for _ in range(times)), strict=True)
    return statistics.median(asked), statistics.median(there)
