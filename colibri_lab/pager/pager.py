"""The expert pager: makes the experts of a step present in frames, and keeps the page table that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..events import PageKind
from ..ops.types import ExpertPages
from .frames import Frames
from .policies import make_policy
from .policy import Policy
from .transfer import Job, Transfer

MIB = 1 << 20
WAVE = 512 * MIB  # most bytes of one `acquire`, since an interrupt waits for its end


class Pager:
    """Experts of all sparse layers under one budget.

    table int32 [L, E, G] maps a page to its frame, -1 where it is not in memory. Counts are experts, not pages.
    on_page(t_ns, kind, layer, expert, pages, wait_ns, step) is told of faults and evictions.
    """

    def __init__(self, *, layers: int, experts: int, sparse: Sequence[bool], top_k: int, pages: int, budget: int,
                 policy: str | Policy, transfer: Transfer, on_page: Any = None,
                 poison: bool = False) -> None:  # fmt: skip
        self.experts, self.top_k = experts, top_k
        self._uses = sum(sparse) * top_k  # experts that one token uses in all layers
        self._policy, self._transfer = make_policy(policy, experts, self._uses), transfer
        self.on_page = on_page
        self.step = 0  # number of the running step, set by the engine for the events
        most = sum(sparse) * experts
        self.frames = Frames(pages, most, 0, poison)
        self.budget = 0
        self.table: NDArray[np.int32] = np.full((layers, experts, pages), -1, np.int32)
        self._run = [-1] * (layers * experts)  # key -> run, the table's short form
        self.resident = 0
        self.faults = self.hits = self.evictions = self.bytes_read = self.wait_ns = 0
        self.resize(budget)

    @property
    def arrays(self) -> ExpertPages:
        return ExpertPages(self.frames.array, self.table)

    @property
    def least(self) -> int:
        """Bytes of the smallest budget: the experts of one token in one layer."""
        return self.top_k * self.frames.run_bytes

    @property
    def most(self) -> int:
        """Bytes of all experts."""
        return self.frames.most * self.frames.run_bytes

    @property
    def room(self) -> int:
        """Experts that one `acquire` may ask for: all that fit, but no more than can be read in well under a second."""
        return self._room

    @property
    def direct(self) -> bool:
        """Whether pages are read past the page cache (O_DIRECT)."""
        return self._transfer.direct

    def acquire(self, layer: int, wanted: Sequence[int]) -> None:
        """Return when all wanted experts (distinct, at most `room`) are in memory; they stay until the next call."""
        run, base, hit = self._run, layer * self.experts, self._policy.hit
        missing = None
        for expert in wanted:
            if run[base + expert] >= 0:
                hit(base + expert)
            elif missing is None:
                missing = [expert]
            else:
                missing.append(expert)
        if missing is None:
            self.hits += len(wanted)
        else:
            self.hits += len(wanted) - len(missing)
            self._fault(layer, missing, {base + expert for expert in wanted})

    def _fault(self, layer: int, missing: list[int], busy: set[int]) -> None:
        start = clock()
        base, taken = layer * self.experts, []
        try:
            for expert in missing:
                if not self.frames.free:
                    self._evict(self._policy.victim(busy))
                taken.append((expert, self.frames.take()))
            self._transfer.load([Job(layer, expert, self.frames.view(run)) for expert, run in taken])
        except BaseException:
            for _, run in taken:
                self.frames.release(run)
            raise
        wait = clock() - start
        for expert, run in taken:
            self._run[base + expert] = run
            self.table[layer, expert] = range(run * self.frames.pages, (run + 1) * self.frames.pages)
            self._policy.admit(base + expert)
        self.resident += len(taken)
        self.faults += len(taken)
        self.bytes_read += len(taken) * self.frames.run_bytes
        self.wait_ns += wait
        if self.on_page:
            for expert in missing:
                self.on_page(start, PageKind.FAULT, layer, expert, self.frames.pages, wait, self.step)

    def _evict(self, key: int) -> None:
        layer, expert = divmod(key, self.experts)
        self._policy.forget(key)
        run, self._run[key] = self._run[key], -1
        self.table[layer, expert] = -1
        self.frames.release(run)
        self.resident -= 1
        self.evictions += 1
        if self.on_page:
            self.on_page(clock(), PageKind.EVICT, layer, expert, self.frames.pages, 0, self.step)

    def follow(self, chosen: str | Policy) -> None:
        """Another policy decides from now on; what is in memory stays, in no particular order of merit."""
        policy = make_policy(chosen, self.experts, self._uses)
        for key, run in enumerate(self._run):
            if run >= 0:
                policy.admit(key)
        self._policy = policy

    def check(self, budget: int) -> int:
        """The number of experts that a budget in bytes holds; ConfigError when one token's do not fit."""
        if budget < self.least:
            raise ConfigError(
                f"expert_cache_bytes: {budget / MIB:.4g} MiB is too little for this model: "
                f"one token needs {self.top_k} experts at once, so the least is {self.least / MIB:.4g} MiB"
            )
        return min(budget // self.frames.run_bytes, self.frames.most)

    def resize(self, budget: int) -> None:
        """Change the budget between steps: experts leave by policy, the rest close up, memory returns to the system."""
        capacity = self.check(budget)
        while self.resident > capacity:
            self._evict(self._policy.victim(()))
        used = {run for run in self._run if run >= 0}
        holes = iter(sorted(set(range(min(capacity, self.frames.capacity))) - used))
        for key, run in enumerate(self._run):
            if run >= capacity:
                hole = next(holes)
                self.frames.move(run, hole)
                self._run[key] = hole
                self.table[divmod(key, self.experts)] = range(hole * self.frames.pages, (hole + 1) * self.frames.pages)
        self._room = min(capacity, max(self.top_k, WAVE // self.frames.run_bytes))
        self.frames.resize(capacity, {run for run in self._run if run >= 0})
        self.budget = min(budget, self.most)

    def counters(self) -> dict[str, int | float]:
        pages = self.frames.pages
        return {
            "faults": self.faults,
            "hits": self.hits,
            "evictions": self.evictions,
            "bytes_read": self.bytes_read,
            "io_wait_s": self.wait_ns / 1e9,
            "frames": self.frames.capacity * pages,
            "frames_used": self.resident * pages,
            "budget_bytes": self.budget,
            "experts_resident": self.resident,
        }

    def close(self) -> None:
        self._transfer.close()
