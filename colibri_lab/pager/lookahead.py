"""Between the layers: ask the prefetcher, begin the reads, and find out how good the last guess was."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from .pager import Pager
from .prefetchers import Prefetcher


class Lookahead:
    """One prefetcher at work on one pager. `after_experts`: it wants to be asked when the layer has been computed."""

    def __init__(self, pager: Pager, prefetcher: Prefetcher, pages: int | None) -> None:
        """pages: of one guess, None for log2 of the context's length; whole experts are read, at least one."""
        self._pager, self._prefetcher, self._pages = pager, prefetcher, pages
        self.after_experts = bool(getattr(prefetcher, "after_experts", False))
        self._guess: dict[int, frozenset[int]] = {}  # layer -> what was guessed of it
        self._foreseen, self._asked = [0, 0], [0, 0]  # prefill, decode

    @property
    def limit(self) -> int:
        """Experts of one guess now."""
        pages = int(log2(max(2, self._pager.context))) if self._pages is None else self._pages
        assert self._pager.ahead is not None
        return min(max(1, pages // self._pager.frames.pages) if pages else 0, self._pager.ahead.most)

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
        if pager.complete:
            return
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
