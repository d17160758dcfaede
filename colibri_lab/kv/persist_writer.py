"""Slots to blocks of a data file: what a running sequence has written so far."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..ops.types import KVPool
from .persist_files import write_all
from .persist_format import BLOCK, Index


class SlotBytes:
    """The pool as bytes: keys[s] and values[s] of slot s, uint8 [slots, bytes of a slot]."""

    def __init__(self, pool: KVPool, slots: int, size: int) -> None:
        self.keys: NDArray[np.uint8] = pool.k[: slots * size].reshape(slots, -1).view(np.uint8)
        self.values: NDArray[np.uint8] = pool.v[: slots * size].reshape(slots, -1).view(np.uint8)
        self.slot = self.keys.shape[1]
        self.token = self.slot // size


@dataclass(frozen=True)
class Saved:
    """Block `place` holds the first `fill` tokens of a slot; k, v: crc32 of these keys and values."""

    place: int
    fill: int
    k: int
    v: int


@dataclass
class Writer:
    """The locked data file of one sequence. saved: slot -> where it is. place: the next free block.

    A slot keeps its block: when it has more tokens than were saved, they are added behind those, which stay the same
    bytes. So an index that was published earlier stays true.
    """

    name: str
    fd: int
    saved: dict[int, Saved] = field(default_factory=dict)
    place: int = 0
    published: bool = False

    def missing(self, slots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of (slot, fill) that the file does not have yet."""
        return [(s, fill) for s, fill in slots if s not in self.saved or self.saved[s].fill < fill]

    def save(self, slots: Sequence[tuple[int, int]], memory: SlotBytes) -> int:
        """Write slots with `fill` tokens each; the bytes written. OSError: nothing counts as saved."""
        new: dict[int, Saved] = {}
        run: list[memoryview] = []  # blocks that follow each other in the file, whole
        begin = written = 0
        next_place = self.place
        for slot, fill in slots:
            size, old = fill * memory.token, self.saved.get(slot)
            place = next_place if old is None else old.place
            next_place += old is None
            keys, values = memory.keys[slot, :size].data, memory.values[slot, :size].data
            at = 2 * place * memory.slot
            if size == memory.slot and old is None:
                if run and begin + len(run) * memory.slot != at:
                    write_all(self.fd, run, begin)
                    run = []
                begin = begin if run else at
                run += [keys, values]
            else:
                write_all(self.fd, [keys], at)
                write_all(self.fd, [values], at + memory.slot)
            new[slot] = Saved(place, fill, zlib.crc32(keys), zlib.crc32(values))
            written += 2 * size
        write_all(self.fd, run, begin)
        self.place = next_place
        self.saved |= new
        return written

    def close(self) -> None:
        os.close(self.fd)


def index_of(
    tokens: NDArray[np.int32],
    where: NDArray[np.int32],
    first: NDArray[np.int16],
    tables: Sequence[dict[int, list[int]]],
    saved: dict[int, Saved],
    size: int,
) -> Index:
    """The index of a sequence whose slots are all saved. where, first: [L, T] of KVPool; tables: as KVCache.table."""
    rows: list[tuple[int, ...]] = []
    block_of = np.zeros(int(where.max()) // size + 1, np.int32)
    for layer, table in enumerate(tables):
        for owner, slots in table.items():
            for slot in slots:
                if slot in saved:
                    block_of[slot] = len(rows)
                    at = saved[slot]
                    rows.append((layer, owner, at.fill, at.place, at.k, at.v))
    return Index(tokens, block_of[where // size] * size + where % size, first.copy(), np.array(rows, BLOCK))
