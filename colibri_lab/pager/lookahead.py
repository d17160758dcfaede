"""Between the layers: ask the prefetchers, begin the reads, and find out how good the last guesses were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from math import log2
from time import perf_counter_ns as clock
from typing import Any

from .pager import Pager
from .prefetchers import Prefetcher

Key = tuple[int, int]  # (layer, expert)
LATELY = 128  # guesses of a place, after which earlier ones count half
LOOKS, LEAST_NS = 64, 10_000_000  # between two looks at the disk, at least
SURE = 0.8  # how often a guess must be right where the disk reads all the time: a wrong one then costs what a right one
# saves, and what is needed meanwhile waits until it has been read


class Recall:
    """How many of the experts asked for a guess had named, in memory or not; [prefill, decode].

    And how often each place of a guess, most wanted first, was right lately.
    """

    def __init__(self) -> None:
        self._guess: dict[int, dict[int, None]] = {}  # layer -> what was guessed of it, in order, and is not known yet
        self._foreseen, self._asked = [0, 0], [0, 0]
        self._right, self._made = list[float](), list[float]()  # of each place

    def guessed(self, layer: int, experts: Sequence[int]) -> None:
        self._guess.setdefault(layer, {}).update(dict.fromkeys(experts))

    def known(self, layer: int, asked: Collection[int], decode: bool) -> None:
        """What the rows of a layer really use, distinct; a layer that nobody guessed at does not count."""
        guess = self._guess.pop(layer, None)
        if guess is None:
            return
        self._asked[decode] += len(asked)
        right, made = self._right, self._made
        for _ in range(len(guess) - len(right)):
            right.append(1.0)
            made.append(1.0)
        for place, expert in enumerate(guess):
            if made[place] > LATELY:
                right[place], made[place] = right[place] / 2, made[place] / 2
            made[place] += 1
            if expert in asked:
                right[place] += 1
                self._foreseen[decode] += 1

    def likely(self, experts: Sequence[int], least: float) -> list[int]:
        """Those in places that were right in at least this share of the guesses; a new place has yet to show it."""
        places = len(self._right)
        return [e for i, e in enumerate(experts) if i >= places or self._right[i] >= least * self._made[i]]

    def counters(self, name: str) -> dict[str, float]:
        shares = [foreseen / max(1, asked) for foreseen, asked in zip(self._foreseen, self._asked, strict=True)]
        return {f"prefill_{name}": shares[0], f"decode_{name}": shares[1]}


class Busy:
    """The share of the time in which the disk was reading lately, 0 to 1."""

    def __init__(self) -> None:
        self.share, self._looks = 0.0, 0
        self._clock, self._reading = clock(), 0

    def now(self, reading_ns: Callable[[], int]) -> float:
        """reading_ns: how long the disk has been reading so far; asked now and then."""
        self._looks += 1
        if self._looks >= LOOKS and (passed := clock() - self._clock) > LEAST_NS:
            reading = reading_ns()
            share = min(1.0, (reading - self._reading) / passed)
            self.share, self._looks = (self.share + share) / 2, 0
            self._clock, self._reading = self._clock + passed, reading
        return self.share


class Lookahead:
    """Prefetchers at work on one pager, most trusted first: they share the limit, and what several name is read once.

    `after_experts`: one of them wants to be asked when the layer has been computed.
    """

    def __init__(self, pager: Pager, make: Callable[[Any], dict[str, Prefetcher]], pages: int | None) -> None:
        """make: the prefetchers of a setting by name. pages: of one guess, in whole experts, at least one; None: log2
        of the context's length, and at least the experts that the rows of the step may need of a layer."""
        self._pager, self._make, self._pages = pager, make, pages
        self._prefetchers: dict[str, Prefetcher] = {}
        self._together, self._each, self._busy = Recall(), dict[str, Recall](), Busy()
        self.after_experts = False
        self.changes = -1  # the first choice is none

    def follow(self, chosen: str | Prefetcher | None) -> None:
        """Other prefetchers from now on, without history; what the earlier ones have on its way is given up."""
        self._prefetchers = self._make(chosen)
        self._each |= {name: Recall() for name in self._prefetchers if name not in self._each}
        self.after_experts = any(getattr(p, "after_experts", False) for p in self._prefetchers.values())
        self._pager.guess(self._kept() if self.active else 0)
        self.changes += 1

    @property
    def active(self) -> bool:
        """Whether there is any prefetcher to ask."""
        return bool(self._prefetchers)

    def _kept(self) -> int:
        """Runs of frames that guesses share: each is one that an expert which was asked for does not have, so they are
        few: what was set, and `Pager.guess` keeps one token's experts of a layer at the least."""
        return max(1, (self._pages or 0) // self._pager.frames.pages)

    def limit(self, rows: int = 1) -> int:
        """Experts of one guess in a step of so many rows that may be read."""
        return min(self._named(rows), self._pager.ahead.most)

    def _named(self, rows: int) -> int:
        """The same, with those in memory."""
        pager = self._pager
        if self._pages is None:
            return max(pager.top_k * rows, int(log2(max(2, pager.context))) // pager.frames.pages)
        return max(1, self._pages // pager.frames.pages) if self._pages else 0

    def look(self, layer: int, chosen: Sequence[Sequence[int]]) -> None:
        """The rows' experts [n][k] of a layer are known and in memory."""
        pager, limit, named = self._pager, self.limit(len(chosen)), self._named(len(chosen))
        pager.settle(layer)
        asked = {expert for row in chosen for expert in row}
        for recall in (self._together, *self._each.values()):
            recall.known(layer, asked, pager.decode)
        missing, pager.missed = pager.missed, []
        if pager.full:
            return  # nothing is left to guess
        said: dict[Key, bool] = {}  # most trusted first; whether it is likely enough to be read
        least = SURE * self._busy.now(pager.reading_ns)
        for name, prefetcher in self._prefetchers.items():
            target, experts = prefetcher.guess(layer, chosen, missing)
            if experts := experts[:named]:
                recall = self._each[name]
                recall.guessed(target, experts)
                likely = recall.likely(experts, least)
                for expert in experts:
                    said[target, expert] = said.get((target, expert), False) or expert in likely
        for target, keys in groupby(said, key=lambda key: key[0]):
            experts = [expert for _, expert in keys]
            self._together.guessed(target, experts)
            limit -= pager.prefetch(target, [e for e in experts if said[target, e]], limit)

    def counters(self) -> dict[str, int | float]:
        """Shares of the experts asked for that the guess before had named, read or not: all prefetchers together, and
        each of them, whether it was the first to say so or not."""
        found: dict[str, int | float] = {"prefetcher_changes": self.changes}
        found |= self._together.counters("prefetch_recall")
        for name, recall in self._each.items():
            found |= recall.counters(f"prefetch_recall_{name}")
        return found
