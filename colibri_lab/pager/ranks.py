"""The lowest of ranks that only rise, for policies that order experts by more than their last use."""

from __future__ import annotations

from collections.abc import Container
from heapq import heapify, heappop, heappush, heapreplace

Rank = tuple[float, int, int]  # (score, time of the last use, key): the smallest leaves


class Ranks:
    """Ranks of the keys in memory, `of`. A rise is written there and leaves the heap's entry behind, too low.

    `lowest` takes the heap's top and puts it back with its true rank until the top is true: each such step is paid by
    an earlier rise, so a call costs O(log n) on average.
    """

    def __init__(self) -> None:
        self.of: dict[int, Rank] = {}
        self._heap: list[Rank] = []

    def add(self, rank: Rank) -> None:
        self.of[rank[2]] = rank
        heappush(self._heap, rank)

    def drop(self, key: int) -> None:
        del self.of[key]
        if len(self._heap) > 2 * len(self.of) + 64:  # mostly entries of experts that have left
            self._heap = list(self.of.values())
            heapify(self._heap)

    def lowest(self, busy: Container[int]) -> Rank | None:
        """The lowest rank of a key that is not busy; None where all are."""
        heap, aside = self._heap, list[Rank]()
        try:
            while heap:
                top = heap[0]
                true = self.of.get(top[2])
                if true is None:
                    heappop(heap)  # it has left
                elif true != top:
                    heapreplace(heap, true)
                elif top[2] in busy:
                    aside.append(heappop(heap))
                else:
                    return top
        finally:
            for rank in aside:
                heappush(heap, rank)
        return None
