"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from ..errors import PagerError
from .frequency import LFRU, LFU
from .policy import LRU, Policy
from .segments import SLRU
from .stale import LeastStale

POLICIES: dict[str, Callable[[int, int], Policy]] = {  # (experts of a layer, experts that one token uses) -> policy
    "lru": lambda experts, uses: LRU(),
    "lfu": lambda experts, uses: LFU(),
    "lfru": lambda experts, uses: LFRU(half_life=16.0 * uses),  # 16 tokens: docs/benchmarks.md says why
    "slru": lambda experts, uses: SLRU(),
    "least_stale": lambda experts, uses: LeastStale(experts),
}


def make_policy(chosen: str | Policy, experts: int, uses: int) -> Policy:
    """A policy by name, or the object itself. experts: of one layer; uses: experts of one token in all layers."""
    return POLICIES[chosen](experts, uses) if isinstance(chosen, str) else chosen


def policy_name(chosen: object) -> str:
    """What to call it where people read."""
    return chosen if isinstance(chosen, str) else str(getattr(chosen, "name", type(chosen).__name__))


def victim_of(policy: Policy, run: Sequence[int], busy: Container[int], pinned: Container[int]) -> int:
    """Whom the policy lets go; PagerError where that is no expert that can. run: of each key, -1 if not in memory."""
    key = policy.victim(busy)
    known = isinstance(key, (int, np.integer)) and 0 <= key < len(run)
    if not known or run[key] < 0 or key in busy or key in pinned:
        why = "in use by the running step" if known and key in busy else "no expert in memory"
        if known and key in pinned:
            why = "pinned"
        raise PagerError(f"eviction_policy {type(policy).__name__}: victim() gave {key!r}, which is {why}")
    return int(key)
