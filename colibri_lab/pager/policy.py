"""Which expert leaves a full cache: bookkeeping only, O(1) per call, no frames, no bytes.

A key is layer * experts + expert. The pager calls `hit` for each wanted expert that is in memory, `admit` for one that
was read, `victim` when it needs room, and `forget` for one that left. Policies by name are in `policies`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Protocol


class Policy(Protocol):
    """What an eviction policy does. `busy` holds the keys of the running step, which must stay."""

    def hit(self, key: int) -> None: ...

    def admit(self, key: int) -> None: ...

    def victim(self, busy: Container[int]) -> int:
        """A key in memory that is not busy. The pager guarantees that there is one."""

    def forget(self, key: int) -> None: ...


class RowCounting(Policy, Protocol):
    """A policy that counts rows: a prompt's step is one hit of nearly every expert, but far from as many uses of each.

    `again` is optional: `hit` and `admit` are one use each, and a policy that has it is told of the others.
    """

    def again(self, key: int, uses: int) -> None:
        """`uses` more rows of a layer's pass use the key, in memory or not; its hit or admission follows."""


class LRU:
    """The expert that was not used for the longest time leaves."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self.hit = self._order.move_to_end  # bound once: this is called for every expert of every token

    def admit(self, key: int) -> None:
        self._order[key] = None

    def victim(self, busy: Container[int]) -> int:
        for key in self._order:  # busy keys were touched last, so the first is nearly always the answer
            if key not in busy:
                return key
        raise LookupError("all experts in memory are in use")

    def forget(self, key: int) -> None:
        del self._order[key]
