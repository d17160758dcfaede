"""A cache without bytes: replays accesses under a policy and counts what the engine would have counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from colibri_lab.analysis.accesses import Accesses
from colibri_lab.analysis.belady import belady
from colibri_lab.dispatch.waves import Dispatcher
from colibri_lab.pager.pins import Pins
from colibri_lab.pager.policies import make_policy, tell_rows
from colibri_lab.pager.policy import Policy


@dataclass(frozen=True)
class Counts:
    """Experts found in memory, read, and thrown out; by_step: the faults of each step (Belady's are not told apart)."""

    hits: int
    faults: int
    evictions: int
    pin_hits: int = 0  # of the hits
    by_step: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.faults)


def simulate(trace: Accesses, capacity: int, policy: str | Policy = "lru", room: int | None = None,
             pin_after: int | None = None, pin_share: float = 0.25) -> Counts:  # fmt: skip
    """Replay a trace in a cache of `capacity` experts. room: experts asked for at once, none: the capacity.

    policy: a name of pager.policies, an object, `belady` (no cache does better: what would come again latest stays out)
    or `belady_forced` (the best for a cache that has to take in whatever is asked for, as the engine's does). Pins as
    in pager.pins; Belady needs none.
    """
    room = room or capacity
    if policy in ("belady", "belady_forced"):
        waves = [[layer * trace.experts + e for e in wanted] for layer, wanted in trace.waves(room)]
        return Counts(*belady(waves, capacity, forced=policy == "belady_forced"))
    layers = {layer for step in trace.steps for layer, _ in step}
    chosen = make_policy(policy, trace.experts, trace.top_k)
    pins = Pins(pin_after, pin_share, (max(layers, default=0) + 1) * trace.experts) if pin_after else None
    cache = Cache(trace.experts, trace.top_k, capacity, chosen, pins, room)
    split, by_step = Dispatcher(trace.experts, trace.top_k).split, []
    for i, step in enumerate(trace.steps):
        whole, before = [(layer, rows, split(rows, trace.experts)[0][2]) for layer, rows in step], cache.faults
        cache.step(whole, bool(trace.decode and trace.decode[i]))
        by_step.append(cache.faults - before)
    return replace(cache.counts, by_step=tuple(by_step))


class Cache:
    """One cache of `capacity` experts under a policy, step by step; room: experts asked for at once, none: capacity."""

    def __init__(self, experts: int, top_k: int, capacity: int, policy: Policy, pins: Pins | None = None,
                 room: int | None = None) -> None:  # fmt: skip
        self._experts, self._capacity, self._room = experts, capacity, room or capacity
        self._split = Dispatcher(experts, top_k).split
        self._policy, self._pins = policy, pins
        if pins:
            pins.limit(capacity, top_k)
        self._resident: set[int] = set()
        self.hits = self.faults = self.evictions = self.pin_hits = 0

    @property
    def counts(self) -> Counts:
        return Counts(self.hits, self.faults, self.evictions, self.pin_hits)

    def step(self, layers: Sequence[tuple[int, list[list[int]], Sequence[int]]], decode: bool) -> None:
        """A step of the engine: (layer, experts of each row [n][k], all of them together) of its sparse layers."""
        if self._pins and decode:
            for key in self._pins.next_token():
                self._policy.admit(key)
        room = min(self._room, self._capacity - (self._pins.most if self._pins else 0))
        for layer, rows, together in layers:
            first = layer * self._experts
            tell_rows(self._policy, first, rows)
            if len(together) <= room:
                self._ask([first + expert for expert in together], decode)
                continue
            for _, _, wanted in self._split(rows, room):
                self._ask([first + expert for expert in wanted], decode)

    def _ask(self, keys: list[int], decode: bool) -> None:
        policy, resident, pins = self._policy, self._resident, self._pins
        missing = [key for key in keys if key not in resident]
        for key in keys:
            if pins and key in pins.held:
                self.pin_hits += 1
            elif key in resident:
                policy.hit(key)
        for i in range(len(missing)):
            if len(resident) + i >= self._capacity:
                victim = policy.victim(set(keys))
                policy.forget(victim)
                resident.remove(victim)
                self.evictions += 1
        for key in missing:
            policy.admit(key)
        resident.update(missing)
        self.faults += len(missing)
        self.hits += len(keys) - len(missing)
        for key in keys if pins and decode else ():
            if pins and pins.used(key):
                policy.forget(key)


def miss_ratios(trace: Accesses, capacities: Sequence[int], policies: Sequence[str],
                simulated: Callable[..., Counts] = simulate) -> dict[str, list[float]]:  # fmt: skip
    """Miss-ratio curves: for each policy the share of faults at each capacity (experts)."""
    return {name: [1.0 - simulated(trace, c, name).hit_rate for c in capacities] for name in policies}
