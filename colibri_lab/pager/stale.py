"""`least_stale`: layers come round in a known order, so an expert whose layer has just passed is not needed soon."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container


class LeastStale:
    """An expert is stale when the last pass over its layer did not use it; stale experts leave first.

    After an idea of Hoang et al., "SpecMD" (2026): recency alone throws out the experts of the very next layers, since
    those were used longest ago. Here the layer that was passed last gives one first, since its turn is a whole token
    away; then the layer before it, and so on round; within a layer the one used longest ago. Only when no layer has a
    stale one, the same order over the experts that the last passes did use.

    Calls are O(1); `victim` looks at up to two entries of each layer, mostly at those of one.
    """

    def __init__(self, experts: int) -> None:
        """experts: of one layer, to tell the layer of a key."""
        self._experts = experts
        self._stale: list[OrderedDict[int, None]] = []  # by layer, used longest ago first
        self._fresh: list[OrderedDict[int, None]] = []  # used by the last pass over the layer
        self._layer = -1  # of the pass under way

    def hit(self, key: int) -> None:
        layer = self._enter(key)
        self._stale[layer].pop(key, None)
        fresh = self._fresh[layer]
        fresh[key] = None
        fresh.move_to_end(key)

    def admit(self, key: int) -> None:
        self._fresh[self._enter(key)][key] = None

    def victim(self, busy: Container[int]) -> int:
        here = self._layer + 1
        layers = len(self._stale)
        for groups in (self._stale, self._fresh):
            for i in range(1, layers + 1):
                for key in groups[here - i]:  # a negative index goes round
                    if key not in busy:
                        return key
        raise LookupError("all experts in memory are in use")

    def forget(self, key: int) -> None:
        layer = key // self._experts
        group = self._stale[layer] if key in self._stale[layer] else self._fresh[layer]
        del group[key]

    def _enter(self, key: int) -> int:
        """The key's layer; when it is another than before, a new pass over it begins."""
        layer = key // self._experts
        if layer != self._layer:
            while len(self._stale) <= layer:
                self._stale.append(OrderedDict())
                self._fresh.append(OrderedDict())
            self._stale[layer].update(self._fresh[layer])
            self._fresh[layer].clear()
            self._layer = layer
        return layer
