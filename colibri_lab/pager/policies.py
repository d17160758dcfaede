"""The eviction policies by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from itertools import chain

import numpy as np

from ..errors import PagerError
from .frequency import LFRU, LFU
from .policy import LRU, Policy
from .segments import SLRU
from .stale import LeastStale

POLICIES: dict[str, Callable[[int, int], Policy]] = {  # (experts of a layer, of these one token's) -> policy
    "lru": lambda experts, top_k: LRU(),
    "lfu": lambda experts, top_k: LFU(),
    "lfru": lambda experts, top_k: LFRU(experts, 24.0 * top_k),  # docs/benchmarks.md says why 24 tokens
    "slru": lambda experts, top_k: SLRU(),
    "least_stale": lambda experts, top_k: LeastStale(experts),
}


def make_policy(chosen: str | Policy, experts: int, top_k: int) -> Policy:
    """A policy by name, or the object itself. experts: of one layer; top_k: those of them that one token uses."""
    return POLICIES[chosen](experts, top_k) if isinstance(chosen, str) else chosen


def policy_name(chosen: object) -> str:
    """What to call it where people read."""
    return chosen if isinstance(chosen, str) else str(getattr(chosen, "name", type(chosen).__name__))


def tell_rows(policy: Policy, first: int, chosen: Sequence[Sequence[int]]) -> None:
    """Tell a policy that counts rows how many chose each expert. first: key of the layer's expert 0; chosen [n][k]."""
    again = getattr(policy, "again", None)
    if again is not None and len(chosen) > 1:
        for expert, uses in Counter(chain.from_iterable(chosen)).items():
            if uses > 1:
                again(first + expert, uses - 1)


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
