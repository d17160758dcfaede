"""Policies that count uses: `lfu` counts them all alike, `lfru` lets old ones fade."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from heapq import heapify, heappop, heappush, heapreplace
from math import exp2, log2

Rank = tuple[float, int, int]  # (score, time of the last use, key): the smallest leaves


class Ranked(ABC):
    """The expert of the lowest rank leaves. A use may only raise a rank, so the heap is corrected when it is asked.

    `hit` is O(1): it leaves the heap's entry behind, too low. `victim` takes the top and puts it back with its true
    rank until the top is true: each such step is paid by an earlier hit, so a call costs O(log n) on average.
    """

    def __init__(self) -> None:
        self._rank: dict[int, Rank] = {}  # of the keys in memory
        self._heap: list[Rank] = []
        self._now = 0  # uses so far, the clock

    @abstractmethod
    def _score(self, key: int) -> float:
        """The score after a use at `self._now`; never lower than the one before."""

    def hit(self, key: int) -> None:
        self._now += 1
        self._rank[key] = (self._score(key), self._now, key)

    def admit(self, key: int) -> None:
        self.hit(key)
        heappush(self._heap, self._rank[key])

    def victim(self, busy: Container[int]) -> int:
        heap, aside = self._heap, list[Rank]()
        try:
            while heap:
                top = heap[0]
                true = self._rank.get(top[2])
                if true is None:
                    heappop(heap)  # it has left
                elif true != top:
                    heapreplace(heap, true)
                elif top[2] in busy:
                    aside.append(heappop(heap))
                else:
                    return top[2]
        finally:
            for rank in aside:
                heappush(heap, rank)
        raise LookupError("all experts in memory are in use")

    def forget(self, key: int) -> None:
        del self._rank[key]
        if len(self._heap) > 2 * len(self._rank) + 64:  # mostly entries of experts that have left
            self._heap = list(self._rank.values())
            heapify(self._heap)


class LFU(Ranked):
    """The expert that was used least often since the engine was loaded leaves; of equals, the one used longest ago.

    Counts outlive the stay in memory: there are no more keys than experts, and what was popular comes back popular.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def _score(self, key: int) -> float:
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        return uses


class LFRU(Ranked):
    """Frequency with recency: a use counts half after `half_life` uses of anything (Lee et al., "LRFU", 2001).

    The score is log2 of the sum of 2**(t / half_life) over an expert's uses t. All fade alike, so the order of two
    scores never changes without a use, and a use only raises one. Counts outlive the stay in memory.
    """

    def __init__(self, half_life: float = 512.0) -> None:
        """half_life in uses; one token uses layers * top-k experts."""
        super().__init__()
        self._half_life = half_life
        self._scores: dict[int, float] = {}

    def _score(self, key: int) -> float:
        now = self._now / self._half_life
        before = self._scores.get(key)
        score = now if before is None else now + log2(1.0 + exp2(before - now))
        self._scores[key] = score
        return score
