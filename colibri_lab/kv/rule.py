"""Which slots a token's keys and values go to. A rule changes where bytes lie and never what attention computes."""

from __future__ import annotations

from collections.abc import Container, Sized
from typing import Protocol

BASE = -1  # the owner of the slots that are nobody's own


class Owners(Container[int], Sized, Protocol):
    """The owners that a sequence has slots for in a layer, BASE aside."""


class PlacementRule(Protocol):
    """owner(known, expert): the owner whose slots take a token for which `expert` ranks first."""

    def owner(self, known: Owners, expert: int) -> int: ...


class FirstExperts:
    """The first `own` experts to rank first for a sequence in a layer get slots of their own, later ones share BASE."""

    def __init__(self, own: int = 10) -> None:
        self.own = own

    def owner(self, known: Owners, expert: int) -> int:
        return expert if expert in known or len(known) < self.own else BASE
