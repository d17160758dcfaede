"""Between the layers: ask the prefetchers, begin the reads, and find out how good the last guesses were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import log2
from typing import Any

from .pager import Pager
from .prefetchers import Prefetcher

Key = tuple[int, int]  # (layer, expert)


class Recall:
    """How many of the experts asked for a guess had named, in memory or not; [prefill, decode]."""

    def __init__(self) -> None:
        self._guess: dict[int, set[int]] = {}  # layer -> what was guessed of it and is not known yet
        self._foreseen, self._asked = [0, 0], [0, 0]

    def guessed(self, layer: int, experts: Sequence[int]) -> None:
        self._guess.setdefault(layer, set()).update(experts)

    def known(self, layer: int, chosen: Sequence[Sequence[int]], decode: bool) -> None:
        """What the rows of a layer really use [n][k]; a layer that nobody guessed at does not count."""
        guess = self._guess.pop(layer, None)
        if guess is not None:
            asked = {expert for row in chosen for expert in row}
            self._asked[decode] += len(asked)
            self._foreseen[decode] += len(guess & asked)

    def counters(self, name: str) -> dict[str, float]:
        shares = [foreseen / max(1, asked) for foreseen, asked in zip(self._foreseen, self._asked, strict=True)]
        return {f"prefill_{name}": shares[0], f"decode_{name}": shares[1]}


class Lookahead:
    """Prefetchers at work on one pager, most trusted first: they share the limit, and what several name is read once.

    `after_experts`: one of them wants to be asked when the layer has been computed.
    """

    def __init__(self, pager: Pager, make: Callable[[Any], dict[str, Prefetcher]], pages: int | None) -> None:
        """make: the prefetchers of a setting by name. pages: of one guess, in whole experts, at least one; None: log2
        of the context's length, and at least the experts that one token needs of a layer."""
        self._pager, self._make, self._pages = pager, make, pages
        self._prefetchers: dict[str, Prefetcher] = {}
        self._together, self._each = Recall(), dict[str, Recall]()
        self.after_experts = False
        self.changes = -1  # the first choice is none

    def follow(self, chosen: str | Prefetcher | None) -> None:
        """Other prefetchers from now on, without history; what the earlier ones have on its way is given up."""
        self._prefetchers = self._make(chosen)
        self._each |= {name: Recall() for name in self._prefetchers if name not in self._each}
        self.after_experts = any(getattr(p, "after_experts", False) for p in self._prefetchers.values())
        self._pager.guess(self.active)
        self.changes += 1

    @property
    def active(self) -> bool:
        """Whether there is any prefetcher to ask."""
        return bool(self._prefetchers)

    @property
    def limit(self) -> int:
        """Experts of one guess now."""
        pager = self._pager
        if self._pages is None:
            experts = max(pager.top_k, int(log2(max(2, pager.context))) // pager.frames.pages)
        else:
            experts = max(1, self._pages // pager.frames.pages) if self._pages else 0
        return min(experts, pager.ahead.most)

    def look(self, layer: int, chosen: Sequence[Sequence[int]]) -> None:
        """The rows' experts [n][k] of a layer are known and in memory."""
        pager, limit = self._pager, self.limit
        pager.settle(layer)
        for recall in (self._together, *self._each.values()):
            recall.known(layer, chosen, pager.decode)
        missing, pager.missed = pager.missed, []
        if pager.resident == pager.frames.most and pager.above is None:
            return  # nothing is left to guess
        wanted: dict[Key, None] = {}  # most trusted first
        for name, prefetcher in self._prefetchers.items():
            target, experts = prefetcher.guess(layer, chosen, missing)
            if experts := experts[:limit]:
                self._each[name].guessed(target, experts)
                wanted |= dict.fromkeys((target, expert) for expert in experts)
        for target, keys in groupby(list(wanted)[:limit], key=lambda key: key[0]):
            experts = [expert for _, expert in keys]
            self._together.guessed(target, experts)
            pager.prefetch(target, experts)

    def counters(self) -> dict[str, int | float]:
        """Shares of the experts asked for that the guess before had named: what was read ahead, and what each
        prefetcher said within the limit, whether it was the first to say so or not."""
        found: dict[str, int | float] = {"prefetcher_changes": self.changes}
        found |= self._together.counters("prefetch_recall")
        for name, recall in self._each.items():
            found |= recall.counters(f"prefetch_recall_{name}")
        return found
