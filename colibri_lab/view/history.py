"""The newest rows of a stream that never ends, as one contiguous array."""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any, TypeVar

import numpy as np

from colibri_lab.events import TOKEN
from colibri_lab.trace import Batch

View = TypeVar("View")
NEAR = 32


class History:
    """Keeps the last `size` rows; appending costs the rows appended, and now and then one move of the rows kept."""

    def __init__(self, size: int, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self.size, self._end, self.total = size, 0, 0
        self._buffer = np.zeros((size + -(-size // 4), *shape), dtype)

    def append(self, rows: np.ndarray) -> None:
        n = len(rows)
        if not n:
            return
        self.total += n
        if n > self.size:
            rows, n = rows[-self.size :], self.size
        if self._end + n > len(self._buffer):
            kept = self.rows[max(0, len(self.rows) + n - self.size) :]
            self._buffer[: len(kept)] = kept.copy()
            self._end = len(kept)
        self._buffer[self._end : self._end + n] = rows
        self._end += n

    def copy(self) -> History:
        """Of its own; memory for the rows that are kept, and more when it grows."""
        out, kept = copy(self), self.rows
        out._buffer, out._end = np.zeros_like(self._buffer), len(kept)
        out._buffer[: len(kept)] = kept
        return out

    @property
    def rows(self) -> np.ndarray:
        """A view [at most size, ...], oldest first; good until the next append."""
        return self._buffer[max(0, self._end - self.size) : self._end]


class Rows:
    """The newest token rows with what lies beside them: tokens TOKEN [n], route u2 [n, L, k], weight f2 [n, L, k]."""

    def __init__(self, layers: int, top_k: int, size: int = 2048) -> None:
        self._tokens = History(size, TOKEN)
        self._route, self._weight = (History(size, dtype, (layers, top_k)) for dtype in ("u2", "f2"))

    def take(self, batch: Batch) -> None:
        self._tokens.append(batch.tokens)
        self._route.append(batch.route)
        self._weight.append(batch.weight)

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens.rows

    @property
    def route(self) -> np.ndarray:
        return self._route.rows

    @property
    def total(self) -> int:
        return self._tokens.total

    def find(self, sequence: int, positions: np.ndarray) -> np.ndarray:
        """Index into rows of each position of a sequence, -1 where the row is gone or not there yet; int [n]."""
        tokens = self.tokens
        if len(positions) <= NEAR < len(tokens):  # the newest rows are asked for most, and lie close together
            newest = tokens[-2 * NEAR :]
            told = zip(newest["sequence"].tolist(), newest["position"].tolist(), strict=True)
            at = {p: i for i, (s, p) in enumerate(told, len(tokens) - len(newest)) if s == sequence}
            found = [at.get(p, -1) for p in positions.tolist()]
            if -1 not in found:
                return np.array(found, "i8")
        return self._find(tokens, sequence, positions)

    def _find(self, tokens: np.ndarray, sequence: int, positions: np.ndarray) -> np.ndarray:
        mine = np.flatnonzero(tokens["sequence"] == sequence)
        if not len(mine) or not len(positions):
            return np.full(len(positions), -1)
        have = tokens["position"][mine].astype("i8")
        order = np.argsort(have, kind="stable")
        at = np.minimum(np.searchsorted(have[order], positions), len(have) - 1)
        return np.where(have[order][at] == positions, mine[order][at], -1)


def twin(view: View) -> View:
    """A copy that takes events on its own. What its containers hold is shared: views replace it and never change it."""
    out = copy(view)
    for name, value in vars(view).items():
        if isinstance(value, (np.ndarray, dict, list, set, deque, History)):
            setattr(out, name, value.copy())
    return out
