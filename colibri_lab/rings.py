"""Preallocated rings that one thread writes and any thread reads; the writer never waits and never asks who reads."""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np

_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i"}


class Ring:
    """`size` rows of one or more arrays side by side. `claimed` moves before a write, `written` after it: what a reader
    copied is whole where it was written before the copy and not claimed again until after it."""

    def __init__(self, size: int, *arrays: tuple[Any, tuple[int, ...]]) -> None:
        self.size, self.claimed, self.written = size, 0, 0
        self.arrays = [np.zeros((size, *shape), dtype) for dtype, shape in arrays]

    def put(self, row: Any) -> None:
        """One row into the first array."""
        at = self.written
        self.claimed = at + 1
        self.arrays[0][at % self.size] = row
        self.written = at + 1

    def read(self, at: int) -> tuple[int, int, list[np.ndarray]]:
        """(next index, how many were missed, copies of the rows in between)."""
        end = self.written
        start = max(at, end - self.size)
        rows = np.arange(start, end) % self.size
        copies = [array[rows] for array in self.arrays]
        lost = min(max(0, self.claimed - self.size - start), end - start)  # overwritten while they were copied
        return end, start - at + lost, [copy[lost:] for copy in copies]

    def oldest(self) -> int:
        return max(0, self.written - self.size)


class Records(Ring):
    """Rows of a packed record dtype as the first array; `pack(i, *fields)` writes row i.

    After a step that read all its weights from memory no cache holds this code or its data: what it touches is what it
    costs, so a record is packed by one small C function and not by NumPy's assignment of fields.
    """

    def __init__(self, size: int, dtype: np.dtype[Any], *arrays: tuple[Any, tuple[int, ...]]) -> None:
        super().__init__(size, (dtype, ()), *arrays)
        fields = Struct("=" + "".join(_CODES[dtype[name].str[1:]] for name in dtype.names or ()))
        self._pack, self._width, self._bytes = fields.pack_into, fields.size, raw(self.arrays[0])

    def pack(self, i: int, *fields: int) -> None:
        self._pack(self._bytes, i * self._width, *fields)

    def put(self, row: tuple[int, ...]) -> None:
        at = self.written
        self.claimed = at + 1
        self._pack(self._bytes, at % self.size * self._width, *row)
        self.written = at + 1


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array, writable in place."""
    return array.view("u1").reshape(-1).data
