"""A cache without bytes: replays accesses under a policy and counts what the engine would have counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colibri_lab.analysis.accesses import Accesses
from colibri_lab.analysis.belady import belady
from colibri_lab.pager.policies import make_policy
from colibri_lab.pager.policy import Policy


@dataclass(frozen=True)
class Counts:
    """Experts found in memory, read, and thrown out."""

    hits: int
    faults: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.faults)


def simulate(trace: Accesses, capacity: int, policy: str | Policy = "lru", room: int | None = None) -> Counts:
    """Replay a trace in a cache of `capacity` experts. room: experts asked for at once, none: the capacity.

    policy: a name of pager.policies, an object, `belady` (no cache does better: what would come again latest stays out)
    or `belady_forced` (the best for a cache that has to take in whatever is asked for, as the engine's does).
    """
    room = room or capacity
    if policy in ("belady", "belady_forced"):
        waves = [[layer * trace.experts + e for e in wanted] for layer, wanted in trace.waves(room)]
        return Counts(*belady(waves, capacity, forced=policy == "belady_forced"))
    uses = len({layer for step in trace.steps for layer, _ in step}) * trace.top_k
    chosen = make_policy(policy, trace.experts, uses)
    resident: set[int] = set()
    hits = faults = evictions = 0
    for layer, wanted in trace.waves(room):
        keys = [layer * trace.experts + expert for expert in wanted]
        missing = [key for key in keys if key not in resident]
        for key in keys:
            if key in resident:
                chosen.hit(key)
        for i in range(len(missing)):
            if len(resident) + i >= capacity:
                victim = chosen.victim(set(keys))
                chosen.forget(victim)
                resident.remove(victim)
                evictions += 1
        for key in missing:
            chosen.admit(key)
        resident.update(missing)
        faults += len(missing)
        hits += len(keys) - len(missing)
    return Counts(hits, faults, evictions)


def miss_ratios(trace: Accesses, capacities: Sequence[int], policies: Sequence[str],
                simulated: Callable[..., Counts] = simulate) -> dict[str, list[float]]:  # fmt: skip
    """Miss-ratio curves: for each policy the share of faults at each capacity (experts)."""
    return {name: [1.0 - simulated(trace, c, name).hit_rate for c in capacities] for name in policies}
