"""The text of the newest sequence, piece by piece, each with the experts that made it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from colibri_lab.events import NO_EXPERT
from colibri_lab.trace import Batch
from colibri_lab.view.history import Rows

KEPT = 1024


class Pieces(NamedTuple):
    """position int [n], text [n], route u2 [n, L, k]: of the row that the token was sampled from, NO_EXPERT if gone."""

    position: list[int]
    text: list[str]
    route: np.ndarray


class ProseView:
    """Follows the sequence with the highest number; `before` tells a reader whether it missed a piece."""

    def __init__(self, rows: Rows, layers: int, top_k: int) -> None:
        self.rows, self._shape = rows, (layers, top_k)
        self.sequence = -1
        self.missing = 0
        self._pieces: dict[int, str] = {}  # by position, of `sequence` only
        self.last = -1  # the newest position

    def take(self, batch: Batch) -> None:
        self.missing += batch.missing.get("texts", 0)
        for sequence, position, text in batch.texts:
            if sequence > self.sequence:
                self.sequence, self._pieces, self.last = sequence, {}, -1
            if sequence == self.sequence:
                self._pieces[position] = text
                self.last = max(self.last, position)
        if len(self._pieces) > 2 * KEPT:
            for old in sorted(self._pieces)[:-KEPT]:
                del self._pieces[old]

    def after(self, position: int, limit: int = KEPT) -> Pieces:
        """The pieces past a position, at most the newest `limit` of them."""
        at = [p for p in range(max(position + 1, self.last - 4 * KEPT), self.last + 1) if p in self._pieces][-limit:]
        found = self.rows.find(self.sequence, np.array(at, "i8") - 1)
        route = self.rows.route[found] if len(self.rows.route) else np.zeros((len(at), *self._shape), "u2")
        route[found < 0] = NO_EXPERT
        return Pieces(at, [self._pieces[p] for p in at], route)

    def before(self, position: int) -> int:
        """The position of the piece before this one, -1 where there is none."""
        return next((p for p in range(position - 1, max(-1, position - 4 * KEPT), -1) if p in self._pieces), -1)

    @property
    def text(self) -> str:
        """The newest pieces of it, at most 1024."""
        return "".join(self._pieces[p] for p in sorted(self._pieces)[-KEPT:])
