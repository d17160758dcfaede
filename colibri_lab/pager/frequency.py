"""Policies that count uses: `lfu` counts them all alike, `lfru` lets old ones fade. A use is a row's, not a step's."""

from __future__ import annotations

from collections.abc import Container
from math import exp2, inf, log2

from .ranks import Rank, Ranks


class LFU:
    """The expert that was used least often since the engine was loaded leaves; of equals, the one used longest ago.

    Counts outlive the stay in memory: there are no more keys than experts, and what was popular comes back popular.
    `hit` is O(1), `victim` O(log n) on average.
    """

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._now = 0  # uses so far, the clock
        self._uses: dict[int, int] = {}

    def hit(self, key: int) -> None:
        self._ranks.of[key] = self._count(key, 1)

    def admit(self, key: int) -> None:
        self._ranks.add(self._count(key, 1))

    def again(self, key: int, uses: int) -> None:
        rank = self._count(key, uses)
        if key in self._ranks.of:
            self._ranks.of[key] = rank

    def victim(self, busy: Container[int]) -> int:
        rank = self._ranks.lowest(busy)
        if rank is None:
            raise LookupError("all experts in memory are in use")
        return rank[2]

    def forget(self, key: int) -> None:
        self._ranks.drop(key)

    def _count(self, key: int, uses: int) -> Rank:
        self._now += uses
        total = self._uses[key] = self._uses.get(key, 0) + uses
        return total, self._now, key


class LFRU:
    """Frequency with recency, layer by layer: a use counts half after `half_life` uses of its layer.

    The score is that of Lee et al., "LRFU" (2001): log2 of the sum of 2**(t / half_life) over an expert's uses t. All
    of a layer fade alike, so the order of two scores never changes without a use, and a use only raises one. Between
    layers it does change. Each has a clock of its own, so a prompt fades at once what its layer held before; and a
    layer that was just passed is needed a whole token later than the next one, for which its experts count half, those
    of the layers between in proportion. Counts outlive the stay in memory.

    `hit` is O(1); `victim` looks at one expert of each layer.
    """

    def __init__(self, experts: int, half_life: float) -> None:
        """experts: of one layer, to tell the layer of a key; half_life in uses, of which a token has top-k a layer."""
        self._experts, self._half_life = experts, half_life
        self._ranks: list[Ranks] = []  # by layer
        self._clock: list[int] = []  # by layer, its uses so far
        self._here = 0  # the layer of the last use
        self._scores: dict[int, float] = {}

    def hit(self, key: int) -> None:
        layer = self._here = key // self._experts  # `_count`, of a key that has been counted: every token does this
        clock = self._clock[layer] = self._clock[layer] + 1
        now = clock / self._half_life
        score = self._scores[key] = now + log2(1 + exp2(self._scores[key] - now))
        self._ranks[layer].of[key] = score, clock, key

    def admit(self, key: int) -> None:
        rank = self._count(key, 1)
        self._ranks[self._here].add(rank)

    def again(self, key: int, uses: int) -> None:
        rank = self._count(key, uses)
        if key in self._ranks[self._here].of:
            self._ranks[self._here].of[key] = rank

    def victim(self, busy: Container[int]) -> int:
        here, layers = self._here, len(self._ranks)
        found, least = -1, inf
        for layer, ranks in enumerate(self._ranks):
            rank = ranks.lowest(busy)
            if rank is not None:
                away = ((layer - here - 1) % layers + 1) / layers  # tokens until its turn
                worth = rank[0] - self._clock[layer] / self._half_life - away
                if worth < least:
                    found, least = rank[2], worth
        if found < 0:
            raise LookupError("all experts in memory are in use")
        return found

    def forget(self, key: int) -> None:
        self._ranks[key // self._experts].drop(key)

    def _count(self, key: int, uses: int) -> Rank:
        """The rank after so many uses; its layer is the one we are in."""
        layer = self._here = key // self._experts
        while len(self._clock) <= layer:
            self._clock.append(0)
            self._ranks.append(Ranks())
        clock = self._clock[layer] = self._clock[layer] + uses
        now = clock / self._half_life
        before = self._scores.get(key)
        score = self._scores[key] = now + log2(uses if before is None else uses + exp2(before - now))
        return score, clock, key
