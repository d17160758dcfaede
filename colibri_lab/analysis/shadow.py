"""Shadow caches: what each policy would have hit at other budgets, while the run goes on.

Each (policy, capacity) is a cache without bytes that sees every step once, so an update costs the steps since the last
one. Belady needs the future: its bounds are worked out anew over the whole window when there is time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from colibri_lab.analysis.accesses import Accesses, accesses
from colibri_lab.analysis.simulate import Cache, simulate
from colibri_lab.dispatch.waves import Dispatcher
from colibri_lab.events import TOKEN, Phase
from colibri_lab.pager.pins import Pins
from colibri_lab.pager.policies import POLICIES, make_policy

SHARES = tuple(range(10, 101, 10))  # per cent of all experts
BOUNDS = ("belady_forced", "belady")
WINDOW = 1 << 19  # experts asked for by the rows of one window: 4096 rows of 32 layers, top-4
Step = list[tuple[int, list[list[int]], Sequence[int]]]


class Shadow:
    """Rates of the window that is under way: it begins with an empty cache, and begins anew when it is full.

    capacities: experts, 10 to 100 % of all; `now` adds the engine's own. pin_after and pin_share as in the settings.
    """

    def __init__(self, layers: int, experts: int, top_k: int, pin_after: int | None = 100, pin_share: float = 0.25,
                 shares: Sequence[int] = SHARES) -> None:  # fmt: skip
        self._shape, self._pin = (layers, experts, top_k), (pin_after, pin_share)
        self.capacities = [max(top_k, round(layers * experts * share / 100)) for share in shares]
        self.now: int | None = None
        self.clear()

    def clear(self) -> None:
        """An empty window and empty caches."""
        layers, _, top_k = self._shape
        self._caches: dict[tuple[str, int], Cache] = {}
        self._done: dict[tuple[str, int], int] = {}  # steps that a cache has seen, or a bound was worked out over
        self._bound: dict[tuple[str, int], float] = {}
        self._steps: list[tuple[np.ndarray, bool]] = []  # routes u2 [rows, L, k], whether all rows decode
        self._rows, self._most = 0, max(1, WINDOW // (layers * top_k))
        self._prepared: tuple[int, Step] = (-1, [])
        self.hits = self.faults = 0  # of the engine, in the same steps

    @property
    def steps(self) -> int:
        """Of the window."""
        return len(self._steps)

    @property
    def behind(self) -> int:
        """Steps that some policy's cache has not seen yet."""
        return self.steps - min((self._done.get((p, c), 0) for p in POLICIES for c in self._all()), default=0)

    def take(self, tokens: np.ndarray, route: np.ndarray) -> None:
        """Rows TOKEN [n] and their routes u2 [n, L, k], whole steps in order: the rows of one end together."""
        if not len(tokens):
            return
        ends = np.flatnonzero(np.diff(tokens["t_ns"])) + 1
        for rows, routes in zip(np.split(tokens, ends), np.split(route, ends), strict=True):
            if self._rows + len(rows) > self._most:
                self.clear()
            self._rows += len(rows)
            self.hits += int(rows["hits"].sum(dtype="u8"))
            self.faults += int(rows["faults"].sum(dtype="u8"))
            self._steps.append((routes, bool((rows["phase"] == Phase.DECODE).all())))

    def work(self, seconds: float | None = None, bounds: bool = True) -> None:
        """Lets the caches catch up for about so long; none: until they have. bounds: Belady's too."""
        end = None if seconds is None else time.thread_time() + seconds

        def late() -> bool:
            return end is not None and time.thread_time() > end

        first = min((self._done.get((p, c), 0) for p in POLICIES for c in self._all()), default=0)
        for i in range(first, self.steps):
            for policy in POLICIES:
                for capacity in self._all():
                    if self._done.get((policy, capacity), 0) == i:
                        self._cache(policy, capacity).step(self._step(i), self._steps[i][1])
                        self._done[policy, capacity] = i + 1
            if late():
                return
        trace = None
        for capacity in self._all() if bounds and self.steps else ():
            for name in BOUNDS:
                if self._done.get((name, capacity)) == self.steps:
                    continue
                trace = trace or self.trace()
                self._bound[name, capacity] = simulate(trace, capacity, name).hit_rate
                self._done[name, capacity] = self.steps
                if late():
                    return

    def trace(self) -> Accesses:
        """The window's accesses, as for analysis.simulate."""
        route = np.concatenate([routes for routes, _ in self._steps])
        tokens = np.zeros(len(route), TOKEN)
        tokens["t_ns"] = np.repeat(np.arange(self.steps), [len(routes) for routes, _ in self._steps])
        tokens["phase"] = np.repeat([decode for _, decode in self._steps], [len(routes) for routes, _ in self._steps])
        return accesses(tokens, route, self._shape[1])

    def rate(self, policy: str, capacity: int) -> float | None:
        """The hit rate over the steps seen so far; None before there is any."""
        if policy in BOUNDS:
            return self._bound.get((policy, capacity))
        cache = self._caches.get((policy, capacity))
        return cache.counts.hit_rate if cache and cache.hits + cache.faults else None

    def curves(self) -> tuple[list[int], dict[str, list[float | None]]]:
        """(capacities, hit rates of each policy and bound at each)."""
        return self._all(), {name: [self.rate(name, c) for c in self._all()] for name in (*POLICIES, *BOUNDS)}

    def _all(self) -> list[int]:
        return sorted({*self.capacities, *([self.now] if self.now else [])})

    def _cache(self, policy: str, capacity: int) -> Cache:
        if (policy, capacity) not in self._caches:
            layers, experts, top_k = self._shape
            after, share = self._pin
            pins = Pins(after, share, layers * experts) if after else None
            made = make_policy(policy, experts, top_k)
            self._caches[policy, capacity] = Cache(experts, top_k, capacity, made, pins)
        return self._caches[policy, capacity]

    def _step(self, i: int) -> Step:
        """Step i as the caches take it; all of them take the same one after the other."""
        if self._prepared[0] != i:
            _, experts, top_k = self._shape
            tokens = np.zeros(len(self._steps[i][0]), TOKEN)
            split = Dispatcher(experts, top_k).split
            found = accesses(tokens, self._steps[i][0], experts).steps[0]
            self._prepared = i, [(layer, rows, split(rows, experts)[0][2]) for layer, rows in found]
        return self._prepared[1]
