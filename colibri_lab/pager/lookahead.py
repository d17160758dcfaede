"""Between the layers: ask the prefetcher, begin the reads, and find out how good the last guess was."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from .pager import Pager
from .prefetchers import Prefetcher


class Lookahead:
    """One prefetcher at work on one pager. `after_experts`: it wants to be asked when the layer has been computed."""

    def __init__(self, pager: Pager, prefetcher: Prefetcher, pages: int | None) -> None:
        """pages: of one guess, in whole experts, at least one; None: log2 of the context's length, and at least the
        experts that one token needs of a layer."""
        self._pager, self._prefetcher, self._pages = pager, prefetcher, pages
        self.after_experts = bool(getattr(prefetcher, "after_experts", False))
        self._guess: dict[int, frozenset[int]] = {}  # layer -> what was guessed of it
        self._foreseen, self._asked = [0, 0], [0, 0]  # prefill, decode

    @property
    def limit(self) -> int:
        """Experts of one guess now."""
        pager = self._pager
        assert pager.ahead is not None
        if self._pages is None:
            experts = max(pager.top_k, int(log2(max(2, pager.context))) // pager.frames.pages)
        else:
            experts = max(1, self._pages // pager.frames.pages) if self._pages else 0
        return min(experts, pager.ahead.most)

    def look(self, layer: int, chosen: Sequence[Sequence[int]]) -> None:
        """The rows' experts [n][k] of a layer are known and in memory."""
        pager = self._pager
        pager.settle(layer)
        guessed = self._guess.pop(layer, None)
        if guessed is not None:
            asked = {expert for row in chosen for expert in row}
            self._asked[pager.decode] += len(asked)
            self._foreseen[pager.decode] += len(guessed & asked)
        missing, pager.missed = pager.missed, []
        if pager.resident == pager.frames.most:
            return  # nothing is left to guess
        target, experts = self._prefetcher.guess(layer, chosen, missing)
        experts = experts[: self.limit]
        if experts:
            self._guess[target] = frozenset(experts)
            pager.prefetch(target, experts)

    def counters(self) -> dict[str, int | float]:
        """Recall: the share of the experts asked for that the guess before had named, in memory or not."""
        return {
            "prefill_prefetch_recall": self._foreseen[0] / max(1, self._asked[0]),
            "decode_prefetch_recall": self._foreseen[1] / max(1, self._asked[1]),
        }
