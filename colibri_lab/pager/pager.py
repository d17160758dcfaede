"""The expert pager: makes the experts of a step present in frames, and keeps the page table that kernels read."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, PagerError
from ..events import PageKind
from ..memory import free_memory
from ..ops.types import ExpertPages
from .ahead import Ahead
from .frames import Frames
from .phases import PhaseSplit
from .pins import Pins
from .policies import make_policy, victim_of
from .policy import Policy
from .transfer import Flight, Job, Transfer

MIB = 1 << 20
WAVE = 512 * MIB  # most bytes of one `acquire`, since an interrupt waits for its end


class Pager:
    """Experts of all sparse layers under one budget.

    table int32 [L, E, G] maps a page to its frame, -1 where it is not in memory. Counts are experts, not pages.
    on_page(t_ns, kind, layer, expert, pages, wait_ns, step) is told of faults and evictions.
    """

    def __init__(self, *, layers: int, experts: int, sparse: Sequence[bool], top_k: int, pages: int,
                 budget: int | None, policy: str | Policy, transfer: Transfer, on_page: Any = None,
                 poison: bool = False, pin_after: int | None = None, pin_share: float = 0.25,
                 prefetch: bool = False) -> None:  # fmt: skip
        """prefetch: keep a few runs of frames for `prefetch`; pin_after: see Pins, None pins nothing."""
        self.experts, self.top_k = experts, top_k
        self._uses = sum(sparse) * top_k  # experts that one token uses in all layers
        self._policy, self._transfer = make_policy(policy, experts, self._uses), transfer
        self.on_page = on_page
        self.step = 0  # number of the running step, for the events
        self.decode = False  # whether the running step only decodes
        self.context = 1  # positions of its longest sequence
        most = sum(sparse) * experts
        self.frames = Frames(pages, most, 0, poison)
        self.ahead, self._guesses = Ahead(self.frames, transfer), prefetch
        self.missed: list[int] = []  # experts of the running layer that were not in memory, for prefetchers
        self._pins = Pins(pin_after, pin_share, layers * experts) if pin_after else None
        self._pinned: Container[int] = self._pins.held if self._pins else ()
        self.pin_hits = self.pin_events = 0
        self.budget = 0
        self.table: NDArray[np.int32] = np.full((layers, experts, pages), -1, np.int32)
        self._run = [-1] * (layers * experts)  # key -> run, the table's short form
        self.resident = 0
        self._split = PhaseSplit()
        self.faults = self.hits = self.evictions = self.bytes_read = self.wait_ns = 0
        self.resize(self.default() if budget is None else budget)

    @property
    def arrays(self) -> ExpertPages:
        return ExpertPages(self.frames.array, self.table)

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

    @property
    def all_bytes(self) -> int:
        """Bytes read so far, asked for or ahead."""
        return self.bytes_read + self.ahead.bytes

    @property
    def direct(self) -> bool:
        """Whether pages are read past the page cache (O_DIRECT)."""
        return self._transfer.direct

    def begin(self, step: int, decode: bool, context: int) -> None:
        """A step begins: its number, whether all its rows decode, and the length of its longest sequence."""
        self.step, self.decode, self.context, self.missed = step, decode, context, []
        self._split.enter(decode, self._moving())
        if decode and self._pins:
            for key in self._pins.next_token():
                self._pin(key, False)

    def acquire(self, layer: int, wanted: Sequence[int]) -> None:
        """Return when all wanted experts (distinct, at most `room`) are in memory; they stay until the next call."""
        run, base, hit, pinned = self._run, layer * self.experts, self._policy.hit, self._pinned
        missing = None
        for expert in wanted:
            key = base + expert
            if run[key] >= 0:
                if key in pinned:
                    self.pin_hits += 1
                else:
                    hit(key)
            elif missing is None:
                missing = [expert]
            else:
                missing.append(expert)
        if missing is None:
            self.hits += len(wanted)
        else:
            self.hits += len(wanted) - len(missing)
            self._fault(layer, missing, {base + expert for expert in wanted})
        if self._pins and self.decode:
            for expert in wanted:
                if self._pins.used(base + expert):
                    self._pin(base + expert, True)

    def _fault(self, layer: int, missing: list[int], busy: set[int]) -> None:
        start = clock()
        base, taken, jobs = layer * self.experts, list[tuple[int, int]](), list[Job]()
        flying: list[Flight] = []  # on their way already
        guessed: set[int] = set()  # landed before they were asked for
        try:
            for expert in missing:
                if self.resident + len(taken) >= self._keep:
                    self._evict(busy)
                flight = self.ahead.take(base + expert)
                if flight is not None and not flight.cancel():
                    flying.append(flight)
                    if flight.landed:
                        guessed.add(expert)
                    taken.append((expert, flight.run))
                    continue
                if flight is None and not self.frames.free:
                    self.ahead.drop(wait=True)
                run = self.frames.take() if flight is None else flight.run
                taken.append((expert, run))
                jobs.append(Job(layer, expert, self.frames.view(run)))
            if jobs:
                self._transfer.load(jobs)
            for flight in flying:
                flight.wait()
                if flight.error is not None:
                    raise flight.error
        except BaseException:
            for flight in flying:
                flight.wait()  # no frame is free while a reader still writes into it
            for _, run in taken:
                self.frames.release(run)
            raise
        wait = clock() - start if len(guessed) < len(missing) else 0
        for expert, run in taken:
            self._run[base + expert] = run
            self.table[layer, expert] = range(run * self.frames.pages, (run + 1) * self.frames.pages)
            self._policy.admit(base + expert)
        self.resident += len(taken)
        self.faults += len(taken) - len(guessed)
        self.hits += len(guessed)
        self.bytes_read += len(jobs) * self.frames.run_bytes
        self.wait_ns += wait
        self.ahead.bytes += len(flying) * self.frames.run_bytes
        if self._guesses:
            self.missed += missing
        if self.on_page:
            for expert in missing:
                kind, waited = (PageKind.PREFETCH, 0) if expert in guessed else (PageKind.FAULT, wait)
                self.on_page(start, kind, layer, expert, self.frames.pages, waited, self.step)

    def prefetch(self, layer: int, experts: Iterable[int]) -> None:
        """Begin to read what may be asked for soon, most wanted first; takes no frame of an expert that was asked for.

        PagerError for an expert that the model does not have.
        """
        base = layer * self.experts
        for expert in experts:
            if not 0 <= expert < self.experts:
                raise PagerError(f"the prefetcher asked for expert {expert} of layer {layer}: there are {self.experts}")
            if self._run[base + expert] >= 0:
                continue
            if base + expert in self.ahead.flights:
                self.ahead.flights.move_to_end(base + expert)
            elif not self.ahead.issue(base + expert, layer, expert):
                return

    def settle(self, layer: int) -> None:
        """All that the running step needs of this layer is known: guesses at it that are not read yet are cancelled."""
        if self.ahead.flights:
            self.ahead.cancel(layer * self.experts, (layer + 1) * self.experts)

    def _pin(self, key: int, pin: bool) -> None:
        if pin:
            self._policy.forget(key)  # it is not the policy's to give until it is unpinned
            self.pin_events += 1
        else:
            self._policy.admit(key)
        self._set_room()
        if self.on_page:
            kind = PageKind.PIN if pin else PageKind.UNPIN
            self.on_page(clock(), kind, *divmod(key, self.experts), self.frames.pages, 0, self.step)

    def _evict(self, busy: Container[int]) -> None:
        """One expert leaves, by the policy's choice; PagerError where that is no expert that can."""
        key = victim_of(self._policy, self._run, busy, self._pinned)
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
            if run >= 0 and key not in self._pinned:
                policy.admit(key)
        self._policy = policy

    def guess(self, wanted: bool) -> None:
        """From now on some runs of frames are kept for guesses, or none; those on their way are given up."""
        self._guesses = wanted
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
        self.ahead.most = min(max(self.top_k, capacity // 16), capacity - self.top_k) if self._guesses else 0
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
                self.table[divmod(key, self.experts)] = range(hole * self.frames.pages, (hole + 1) * self.frames.pages)
        self._set_room()
        self.frames.resize(capacity, {run for run in self._run if run >= 0})
        self.budget = min(budget, self.most)

    def _set_room(self) -> None:
        pinned = len(self._pins.held) if self._pins else 0
        self._room = min(self._keep - pinned, max(self.top_k, WAVE // self.frames.run_bytes))

    def _moving(self) -> tuple[int, int, int, int]:
        return self.faults, self.hits, self.ahead.hits, self.wait_ns

    def counters(self) -> dict[str, int | float]:
        return {
            "faults": self.faults,
            "hits": self.hits,
            "evictions": self.evictions,
            "bytes_read": self.all_bytes,
            "io_wait_s": self.wait_ns / 1e9,
            "frames": self.frames.capacity * self.frames.pages,
            "frames_used": self.resident * self.frames.pages,
            "budget_bytes": self.budget,
            "experts_resident": self.resident,
            "policy_hits": self.hits - self.pin_hits - self.ahead.hits,
            "pin_hits": self.pin_hits,
            "pinned": len(self._pins.held) if self._pins else 0,
            "pins": self.pin_events,
            **self.ahead.counters(),
            **self._split.counters(self._moving()),
        }

    def close(self) -> None:
        self.ahead.drain()
        self._transfer.close()
