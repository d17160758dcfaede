"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from .frequency import LFRU, LFU
from .policy import LRU, Policy
from .segments import SLRU
from .stale import LeastStale

POLICIES: dict[str, Callable[[int, int], Policy]] = {  # (experts of a layer, experts that one token uses) -> policy
    "lru": lambda experts, uses: LRU(),
    "lfu": lambda experts, uses: LFU(),
    "lfru": lambda experts, uses: LFRU(half_life=16.0 * uses),
    "slru": lambda experts, uses: SLRU(),
    "least_stale": lambda experts, uses: LeastStale(experts),
}


def make_policy(chosen: str | Policy, experts: int, uses: int) -> Policy:
    """A policy by name, or the object itself. experts: of one layer; uses: experts of one token in all layers."""
    return POLICIES[chosen](experts, uses) if isinstance(chosen, str) else chosen


def policy_name(chosen: object) -> str:
    """What to call it where people read."""
    return chosen if isinstance(chosen, str) else str(getattr(chosen, "name", type(chosen).__name__))
