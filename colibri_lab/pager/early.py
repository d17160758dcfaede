"""Reads that begin between the two stages of `router: two_stage`: its fast path's ids are guesses at its own layer.

They are guesses like any others, in the frames that are kept for those: with `prefetcher: none` there are none, and a
guess of `expert_prefetch_pages` is the most at a time. `early_*` in the pager's counters are theirs.
"""

from __future__ import annotations

from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from ..ops.types import ABSENT, Rows
from .lookahead import Lookahead
from .pager import Pager

# Multiply-adds of the second stage for each thread, at least (k experts of H inputs a row), from which two calls pay.
# A second call, the votes and the look for wrong guesses take 0.14 ms (two cores, caches cold after a kernel); so many
# multiply-adds 0.13 to 0.38 ms, the more the fewer experts the first stage shuts out. `bench router` has both stages.
WORTH = 500_000


class EarlyReads:
    """Stands between the stages. least_rows: of a call, below which it is one as ever; shape legend as in types.py."""

    def __init__(self, pager: Pager, ahead: Lookahead, rows: Rows, threads: int) -> None:
        self._pager, self._ahead, self._rows = pager, ahead, rows
        self.least_rows = -(-WORTH * threads // (rows.experts.shape[1] * rows.x.shape[1]))

    def pays(self, layer: int, n: int) -> bool:
        """Whether a sparse layer's call for n rows is to be made in two."""
        if n < self.least_rows or not self._ahead.limit():
            return False
        return bool((self._pager.table[layer, :, 0] == ABSENT).any())

    def attend(self, backend: Any, layer: int, n: int, at: int = 0) -> int:
        """attn_router of a backend that is `types.Staged`, and reads that begin meanwhile; the nanoseconds of these."""
        backend.first_stage(layer, n, at)
        begin = clock()
        issued = self._begin(layer, n, at)
        spent = clock() - begin
        backend.second_stage(layer, n, at)
        if issued:
            begin, base = clock(), layer * self._pager.experts
            users = np.bincount(self._rows.experts[at : at + n].ravel(), minlength=self._pager.experts)  # rows [E]
            self._pager.ahead.cancel({key for key in issued if not users[key - base]})
            spent += clock() - begin
        return spent

    def _begin(self, layer: int, n: int, at: int) -> list[int]:
        """Guess at what most rows have among their ids and is not there; the keys whose reads are issued."""
        pager, ahead, base = self._pager, self._pager.ahead, layer * self._pager.experts
        ids = self._rows.experts[at : at + n].ravel()
        votes = np.bincount(ids + 1, minlength=pager.experts + 1)[1:] * (pager.table[layer, :, 0] == ABSENT)  # [E]
        order = np.argsort(-votes, kind="stable")[: np.count_nonzero(votes)] + base
        wanted = dict.fromkeys(order.tolist())  # keys, most wanted first
        new = [key for key in wanted if key not in ahead.flights][: self._ahead.limit()]
        issued: list[int] = []
        for key in new:
            if not ahead.issue(key, layer, key - base, early=True, keep=wanted):
                break
            issued.append(key)
        return issued
