"""Preallocated rings that one thread writes and any thread reads; the writer never waits and never asks who reads."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def end(self) -> int:
        """The index of the next row."""
        return self.written

    def oldest(self) -> int:
        return max(0, self.end - self.size)


class Objects(Ring):
    """Rows that are any Python objects, in a list: what a row touches is what it costs."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._rows: list[Any] = [None] * size

    def put(self, row: Any) -> None:
        at = self.written
        self.claimed = at + 1
        self._rows[at % self.size] = row
        self.written = at + 1

    def take(self, at: int) -> tuple[int, int, list[Any]]:
        """As read, with a list."""
        end = self.written
        start = max(at, end - self.size)
        copies = [self._rows[i % self.size] for i in range(start, end)]
        lost = min(max(0, self.claimed - self.size - start), end - start)
        return end, start - at + lost, copies[lost:]


class Records(Ring):
    """Rows of a packed record dtype as the first array.

    After a step that read all its weights from memory no cache holds this code or its data: what it touches is what it
    costs, so a record is packed by one small C function and not by NumPy's assignment of fields.
    """

    def __init__(self, size: int, dtype: np.dtype[Any], *arrays: tuple[Any, tuple[int, ...]]) -> None:
        super().__init__(size, (dtype, ()), *arrays)
        fields = Struct("=" + "".join(_CODES[dtype[name].str[1:]] for name in dtype.names or ()))
        self._pack, self._width, self._bytes = fields.pack_into, fields.size, raw(self.arrays[0])

    def put(self, row: tuple[int, ...]) -> None:
        at = self.written
        self.claimed = at + 1
        self._pack(self._bytes, at % self.size * self._width, *row)
        self.written = at + 1


class Deferred(Records):
    """Rows that the writer hands over as they are, a tuple each: one append. Arrays are made of many at once, by the
    writer when MOST are held, and by each reader for itself.

    `_held` is (index of the first, rows) and is replaced as a whole, after its rows stand in the arrays.
    """

    MOST = 256

    def __init__(self, size: int, dtype: np.dtype[Any], *arrays: tuple[Any, tuple[int, ...]]) -> None:
        super().__init__(size, dtype, *arrays)
        self._kinds = [(dtype, ()), *arrays]
        self._most = max(1, min(self.MOST, size // 2))
        self._held: tuple[int, list[tuple[Any, ...]]] = (0, [])

    def hold(self, row: tuple[Any, ...]) -> None:
        """row: the record's fields, then one value for each further array."""
        rows = self._held[1]
        rows.append(row)
        if len(rows) >= self._most:
            self.settle()

    def settle(self) -> None:
        """Writer: all that is held goes into the arrays."""
        rows = self._held[1]
        if rows:
            at = np.arange(self.written, self.written + len(rows)) % self.size
            self.claimed = self.written + len(rows)
            for array, values in zip(self.arrays, self._arrays(rows), strict=True):
                array[at] = values
            self.publish()

    def publish(self) -> None:
        """Writer: the claimed rows are in the arrays, and nothing is held."""
        self.written = self.claimed
        self._held = (self.written, [])

    @property
    def end(self) -> int:
        base, rows = self._held
        return base + len(rows)

    def read(self, at: int) -> tuple[int, int, list[np.ndarray]]:
        base, rows = self._held
        rows = rows[:]
        end = base + len(rows)
        start = max(at, end - self.size)
        index = np.arange(start, max(start, base)) % self.size
        copies = [array[index] for array in self.arrays]
        lost = min(max(0, self.claimed - self.size - start), len(index))
        parts = zip(copies, self._arrays(rows[max(0, start - base) :]), strict=True)
        return end, start - at + lost, [joined([copy[lost:], held]) for copy, held in parts]

    def _arrays(self, rows: list[tuple[Any, ...]]) -> list[np.ndarray]:
        fields = len(self._kinds[0][0].names or ())
        out = [np.zeros(len(rows), self._kinds[0][0])]
        target, width, pack = raw(out[0]), self._width, self._pack
        for i, row in enumerate(rows):
            pack(target, i * width, *row[:fields])
        for j, (dtype, shape) in enumerate(self._kinds[1:], fields):
            out.append(np.array([row[j] for row in rows], dtype).reshape(len(rows), *shape))
        return out


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """As np.concatenate, which would work out the fields of records anew for each part."""
    kind = parts[0].dtype
    if kind.names is None:
        return np.concatenate(parts)
    return np.concatenate([part.view(f"V{kind.itemsize}") for part in parts]).view(kind)


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array, writable in place."""
    return array.view("u1").reshape(-1).data
