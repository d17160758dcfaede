"""Which slots a token's keys and values go to. A rule changes where bytes lie and never what attention computes."""

from __future__ import annotations

from typing import Protocol

BASE = -1  # the owner of the slots that are nobody's own
RECENT = 256  # newest tokens that expert-local attention always sees; also the longest chunk of a prompt there
SINKS = 4  # first tokens of a text, to which models give much weight whatever they say


class PlacementRule(Protocol):
    """How the experts of one sequence and layer share its slots; experts are ranked by the tokens they were first for.

    own: how many have slots of their own, at least 1; the others share the base slots.
    doubles(rank): whether an owner takes two at a time once its first one is full; rank 0 is the most used.
    bar(weakest): tokens that an expert without slots must exceed to take the place of an owner that has `weakest`.
    """

    own: int

    def doubles(self, rank: int) -> bool: ...

    def bar(self, weakest: int) -> int: ...


class ByUse:
    """Slots of their own for ten experts, two at a time for the three most used; a quarter more use takes a place.

    The margin keeps two experts of about equal use from changing places at every token.
    """

    def __init__(self, own: int = 10, double: int = 3) -> None:
        if own < 1:
            raise ValueError(f"own must be at least 1, not {own}")
        self.own, self.double = own, double

    def doubles(self, rank: int) -> bool:
        return rank < self.double

    def bar(self, weakest: int) -> int:
        return weakest + max(16, weakest // 4)
