"""A file of experts without a model: random pages, their checksums, and a pager over it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.ops.layout import PAGE
from colibri_lab.pager.pager import Pager
from colibri_lab.pager.policy import LRU, Policy
from colibri_lab.pager.queue import QueueTransfer
from colibri_lab.pager.reader import Reader
from colibri_lab.pager.threads import ThreadTransfer
from colibri_lab.pager.transfer import Transfer

KINDS = ("queue", "threads")  # who reads


class FakeFile:
    """`layers` x `experts` runs of `pages` pages behind one page of something else."""

    def __init__(self, path: Path, layers: int = 3, experts: int = 5, pages: int = 2, first: int = PAGE) -> None:
        self.path, self.layers, self.experts, self.pages, self.first = path, layers, experts, pages, first
        random = np.random.default_rng(0)
        self.content = random.integers(0, 256, (layers, experts, pages * PAGE), dtype=np.uint8)
        with path.open("wb") as out:
            out.write(b"\0" * first)
            out.write(self.content.tobytes())
        self._fd = os.open(path, os.O_RDONLY)

    def fileno(self) -> int:
        return self._fd

    def extent(self, layer: int, expert: int) -> tuple[int, int]:
        size = self.pages * PAGE
        return self.first + (layer * self.experts + expert) * size, size

    def checksums(self, layer: int, expert: int) -> np.ndarray:
        return np.array([zlib.crc32(page) for page in self.content[layer, expert].reshape(-1, PAGE)], np.uint32)

    def close(self) -> None:
        os.close(self._fd)


def transfer_of(file: FakeFile, kind: str = "queue", piece: int | None = None) -> Transfer[Any]:
    """Three reads at a time; threads where there is no O_DIRECT."""
    reader = Reader(file, piece)
    if kind == "threads" or not reader.direct:
        return ThreadTransfer(reader, 3)
    queue = QueueTransfer.open(reader, 3)
    assert queue is not None
    return queue


def make_pager(file: FakeFile, runs: float, policy: Policy | None = None, top_k: int = 2, kind: str = "queue",
               piece: int | None = None, **more: Any) -> Pager:  # fmt: skip
    """A pager whose budget holds `runs` experts."""
    return Pager(
        layers=file.layers, experts=file.experts, sparse=[True] * file.layers, top_k=top_k, pages=file.pages,
        budget=int(runs * file.pages * PAGE), policy=policy or LRU(), transfer=transfer_of(file, kind, piece),
        poison=True, **more,
    )  # fmt: skip


def check(pager: Pager, file: FakeFile) -> None:
    """Table, frames and counts agree, and every expert in memory holds its own bytes."""
    seen: set[int] = set()
    resident = 0
    for layer in range(file.layers):
        for expert in range(file.experts):
            frames = pager.table[layer, expert]
            if (frames < 0).all():
                continue
            assert (frames >= 0).all() and frames.max() < pager.frames.capacity * file.pages
            assert not seen & set(frames.tolist())
            seen |= set(frames.tolist())
            assert (pager.frames.array[frames].reshape(-1) == file.content[layer, expert]).all()
            resident += 1
    counters = pager.counters()
    assert counters["experts_resident"] == resident
    assert resident == counters["faults"] + counters["prefetch_hits"] - counters["evictions"]
    assert counters["frames_used"] == resident * file.pages
    assert pager.frames.free == pager.frames.capacity - resident - len(pager.ahead.flights)
