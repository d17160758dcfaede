"""Which experts are in memory, in which frames, under which budget, and who leaves when there is no room."""

from __future__ import annotations

from collections.abc import Container, Sequence
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..events import PageKind
from ..memory import free_memory
from ..ops.types import ABSENT, ExpertPages
from .ahead import Ahead
from .frames import Above, Frames
from .pins import Pins
from .policies import make_policy, tell_rows, victim_of
from .policy import Policy
from .transfer import Transfer

MIB = 1 << 20
WAVE = 512 * MIB  # most bytes asked for at once, since an interrupt waits for their end


class Residency:
    """Experts of all sparse layers under one budget.

    table int32 [L, E, G] maps a page to its frame, ABSENT where it is not in memory. Counts are experts, not pages.
    on_page(t_ns, kind, layer, expert, pages, wait_ns, step) is told of faults, evictions, pins and guesses.
    """

    def __init__(self, *, layers: int, experts: int, sparse: Sequence[bool], top_k: int, pages: int,
                 budget: int | None, policy: str | Policy, transfer: Transfer[Any], on_page: Any = None,
                 poison: bool = False, pin_after: int | None = None, pin_share: float = 0.25,
                 prefetch: int = 0) -> None:  # fmt: skip
        """prefetch: see `guess`; pin_after: see Pins, None pins nothing."""
        self.experts, self.top_k = experts, top_k
        self._policy = make_policy(policy, experts, top_k)
        self.on_page = on_page
        self.step = 0  # number of the running step, for the events
        most = sum(sparse) * experts
        self.frames = Frames(pages, most, 0, poison)
        self.ahead, self._guesses = Ahead(self.frames, transfer), prefetch
        self.ahead.on_waste = self._wasted
        self._pins = Pins(pin_after, pin_share, layers * experts) if pin_after else None
        self._pinned: Container[int] = self._pins.held if self._pins else ()
        self.table: NDArray[np.int32] = np.full((layers, experts, pages), ABSENT, np.int32)
        transfer.serve(self.frames, self.table)
        self.arrays = ExpertPages(self.frames.array, self.table, reader=transfer.address)
        self._run = [-1] * (layers * experts)  # key -> run, the table's short form; set as soon as a read is asked for
        self.resident = self.evictions = self.pin_events = self.budget = 0
        self.above: Above | None = None
        self.resize(self.default() if budget is None else budget)

    @property
    def full(self) -> bool:
        """Whether all experts of the model are in memory and there is no faster tier: nobody leaves, nothing moves."""
        return self.resident == self.frames.most and self.above is None

    @property
    def fits_all(self) -> bool:
        """Whether the budget holds all experts of the model: what was read once stays; no faster tier."""
        return self._keep == self.frames.most and self.above is None

    def attach(self, above: Above) -> None:
        """A faster tier takes experts from here from now on, and is told of pins and guesses. ConfigError."""
        self.frames.attach(above)
        self.above = above
        above.guesses(self._guesses > 0)

    @property
    def least(self) -> int:
        """Bytes of the smallest budget: one token's experts in a layer."""
        return self.top_k * self.frames.run_bytes

    @property
    def most(self) -> int:
        """Bytes of all experts."""
        return self.frames.most * self.frames.run_bytes

    @property
    def room(self) -> int:
        """Experts that one `acquire` may ask for: all that fit, but no more than can be read in well under a second."""
        return self._room

    def _pin(self, key: int, pin: bool) -> None:
        if pin:
            self._policy.forget(key)  # it is not the policy's to give until it is unpinned
            self.pin_events += 1
        else:
            self._policy.admit(key)
        if self.above is not None:
            self.above.pin(key, pin)
        if self.on_page:
            kind = PageKind.PIN if pin else PageKind.UNPIN
            self.on_page(clock(), kind, *divmod(key, self.experts), self.frames.pages, 0, self.step)

    def _evict(self, busy: Container[int]) -> None:
        """One expert leaves, by the policy's choice; PagerError where that is no expert that can."""
        key = victim_of(self._policy, self._run, busy, self._pinned)
        layer, expert = divmod(key, self.experts)
        self._policy.forget(key)
        run, self._run[key] = self._run[key], -1
        self.table[layer, expert] = ABSENT
        self.frames.release(run)
        self.resident -= 1
        self.evictions += 1
        if self.on_page:
            self.on_page(clock(), PageKind.EVICT, layer, expert, self.frames.pages, 0, self.step)

    def _wasted(self, key: int) -> None:
        if self.on_page:
            self.on_page(clock(), PageKind.WASTE, *divmod(key, self.experts), self.frames.pages, 0, self.step)

    def follow(self, chosen: str | Policy) -> None:
        """Another policy decides from now on; what is in memory stays, in no particular order of merit."""
        policy = make_policy(chosen, self.experts, self.top_k)
        for key, run in enumerate(self._run):
            if run >= 0 and key not in self._pinned:
                policy.admit(key)
        self._policy = policy

    def chosen(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        """The experts of each row [n][k], before they are asked for together: see policy.RowCounting."""
        tell_rows(self._policy, layer * self.experts, rows)

    def guess(self, wanted: int) -> None:
        """From now on so many runs of frames are kept for guesses: of the budget a sixteenth at most, one token's
        experts of a layer at least; 0: none. Those on their way are given up."""
        self._guesses = wanted
        if self.above is not None:
            self.above.guesses(wanted > 0)
        self.resize(self.budget)

    def check(self, budget: int) -> int:
        """The number of experts that a budget in bytes holds; ConfigError when one token's do not fit."""
        if budget < self.least:
            raise ConfigError(
                f"expert_cache_bytes: {budget / MIB:.4g} MiB is too little for this model: "
                f"one token needs {self.top_k} experts at once, so the least is {self.least / MIB:.4g} MiB"
            )
        return min(budget // self.frames.run_bytes, self.frames.most)

    def default(self) -> int:
        """Bytes of the budget where none was chosen: half of what memory could be had, at most all experts."""
        held = self.resident * self.frames.run_bytes
        return max(self.least, min(self.most, (free_memory() + held) // 2))

    def resize(self, budget: int) -> None:
        """Change the budget between steps: experts leave by policy, the rest close up, memory returns to the system."""
        capacity = self.check(budget)
        self.ahead.drain()
        guesses = max(self.top_k, min(self._guesses, capacity // 16)) if self._guesses else 0
        self.ahead.most = min(guesses, capacity - self.top_k)
        spare = min(self.ahead.most, self.frames.most - capacity)  # runs that demand leaves to guesses
        self._keep = capacity - spare
        if self._pins:
            self._pins.limit(self._keep, self.top_k)
            for key in self._pins.over():
                self._pin(key, False)
        while self.resident > self._keep:
            self._evict(())
        used = {run for run in self._run if run >= 0}
        holes = iter(sorted(set(range(min(capacity, self.frames.capacity))) - used))
        for key, run in enumerate(self._run):
            if run >= capacity:
                hole = next(holes)
                self.frames.move(run, hole)
                self._run[key] = hole
                self.table[divmod(key, self.experts)] = self.frames.of(hole)
        pinned = self._pins.most if self._pins else 0  # they may be pinned between two waves of a layer
        self._room = min(self._keep - pinned, max(self.top_k, WAVE // self.frames.run_bytes))
        self.frames.resize(capacity, {run for run in self._run if run >= 0})
        self.budget = min(budget, self.most)
