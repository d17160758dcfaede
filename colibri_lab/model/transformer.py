"""forward(): a step's rows through the whole model. Read this first; everything else serves it.

Shapes: R rows of the step (a row is one token of one sequence), H hidden, E experts, k experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as clock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..events import NO_EXPERT
from ..ops.types import Backend, Rows


class Experts(Protocol):
    """The pager, seen from here."""

    wait_ns: int  # time spent waiting for pages so far

    @property
    def room(self) -> int: ...

    def chosen(self, layer: int, rows: Sequence[Sequence[int]]) -> None: ...

    def acquire(self, layer: int, wanted: Sequence[int]) -> None: ...


class Cache(Protocol):
    """The KV cache, seen from here."""

    def begin(self, seats: Sequence[int]) -> None: ...

    def place(self, layer: int, first: Sequence[int], at: int = 0) -> Sequence[int]: ...


class Dispatch(Protocol):
    def split(self, chosen: Sequence[Sequence[int]], room: int) -> Sequence[tuple[int, int, Sequence[int]]]: ...


class Choice(Protocol):
    """A router that runs outside the backend."""

    def apply(self, layer: int, n: int, at: int = 0) -> None: ...


class Whole(Protocol):
    """A backend that does some steps at one go, seen from here."""

    def __call__(self, t: Transformer, n: int, seats: Sequence[int]) -> bool: ...


class Ahead(Protocol):
    """The prefetcher, seen from here."""

    after_experts: bool

    def look(self, layer: int, chosen: Sequence[Sequence[int]]) -> None: ...


class Between(Protocol):
    """Who begins reads between the two stages of a backend's router, seen from here."""

    def pays(self, layer: int, n: int) -> bool: ...

    def attend(self, backend: Backend, layer: int, n: int, at: int = 0) -> int: ...


Views = tuple[NDArray[Any], NDArray[Any], list[NDArray[Any]], list[NDArray[Any]]]


class Transformer:
    """The decoder layers over one backend. Stage times of the last forward are in *_ns."""

    def __init__(self, backend: Backend, rows: Rows, sparse: Sequence[bool], pager: Experts, kv: Cache,
                 dispatch: Dispatch, router: Choice | None = None, ahead: Ahead | None = None,
                 between: Between | None = None) -> None:  # fmt: skip
        self.backend, self.rows, self.pager, self.kv = backend, rows, pager, kv
        self._experts = rows.router_logits.shape[1]
        self._dispatch, self._router, self._sparse = dispatch, router, tuple(sparse)
        self._stages = between
        self.follow(ahead)
        shape = (len(self._sparse), *rows.experts.shape)
        self.route: NDArray[np.int32] = np.full(shape, NO_EXPERT, np.int32)  # [L, R, k] choices of the step
        self.gate: NDArray[np.float32] = np.zeros(shape, np.float32)  # [L, R, k] their weights
        self._views: dict[tuple[int, int], Views] = {}
        self.attention_ns = self.router_ns = self.dispatch_ns = self.io_ns = self.experts_ns = 0
        self.whole: Whole | None = None  # asked before each step whether it does it
        self.pressed: list[object] = []  # interrupts that wait for a safe place; see engine.interrupt

    def follow(self, ahead: Ahead | None) -> None:
        """Whom to tell of the experts that each layer chose: before they compute, or after; None: nobody, and nothing
        is read ahead."""
        late = ahead is not None and ahead.after_experts
        self._early: Ahead | None = None if late else ahead
        self._late: Ahead | None = ahead if late else None
        self._between = None if ahead is None else self._stages

    @property
    def reads_ahead(self) -> bool:
        """Whether anybody is told of each layer's experts."""
        return self._early is not None or self._late is not None

    def forward(self, n: int, seats: Sequence[int]) -> None:
        """Rows [0, n) through all layers; rows.token, .position, .seat are set, rows of a seat in order of position."""
        if self.whole is not None and self.whole(self, n, seats):
            return
        backend, pager, kv = self.backend, self.pager, self.kv
        experts, weights, route, gate = self._views.get((0, n)) or self._view(n)
        attention = router = ffn = compute = 0
        waited, (chose, grouped) = pager.wait_ns, self.rows.spent.tolist()
        kv.begin(seats)
        backend.embed(n)  # x [R, H]
        begin = clock()
        for layer, sparse in enumerate(self._sparse):
            reading = self._attend(layer, sparse, n)  # x, ffn_in [R, H]; router_logits [R, E]; experts, weights [R, k]
            routed = clock()
            if sparse:
                if self._router is not None:
                    self._router.apply(layer, n)
                    router += -routed + (routed := clock())
                np.copyto(route[layer], experts)
                np.copyto(gate[layer], weights)
                chosen = experts.tolist()  # [R][k]
                kv.place(layer, [row[0] for row in chosen])
                if n > 1:
                    pager.chosen(layer, chosen)
                for first, last, wanted in self._dispatch.split(chosen, pager.room):
                    pager.acquire(layer, wanted)
                    if self.pressed:
                        raise KeyboardInterrupt
                    if self._early is not None and last == self._experts:
                        self._early.look(layer, chosen)  # its reads go on while the experts compute
                    start = clock()
                    backend.expert_ffn(layer, n, first, last)  # x [R, H] after the last wave
                    compute += clock() - start
                if self._late is not None:
                    self._late.look(layer, chosen)
            else:
                kv.place(layer, [-1] * n)
                start = clock()
                backend.expert_ffn(layer, n, 0, 0)
                compute += clock() - start
            done = clock()
            attention += routed - begin - reading
            ffn += done - routed + reading
            begin = done
            if self.pressed:
                raise KeyboardInterrupt
        self.io_ns, (chosen_ns, grouped_ns) = pager.wait_ns - waited, self.rows.spent.tolist()
        chose, grouped = chosen_ns - chose + router, grouped_ns - grouped
        self.attention_ns, self.router_ns = attention - chose, chose
        self.experts_ns, self.dispatch_ns = compute - grouped, ffn - compute - self.io_ns + grouped

    def _attend(self, layer: int, sparse: bool, n: int, *at: int) -> int:
        """A layer's attention and router for n rows, from row 0 or `at` on; the nanoseconds in which reads began
        between the two stages of the router."""
        between = self._between
        if between is not None and sparse and between.pays(layer, n):
            return between.attend(self.backend, layer, n, *at)
        self.backend.attn_router(layer, n, *at)
        return 0

    def head(self, out_rows: Sequence[int]) -> None:
        """Logits [n, V] of some rows of the step."""
        n = len(out_rows)
        self.rows.out_row[:n] = out_rows
        self.backend.head(n)

    def _view(self, n: int, at: int = 0) -> Views:
        """Views of n rows, made once for all steps: slicing costs more than all else that Python does in a layer."""
        rows, some = self.rows, slice(at, at + n)
        views = rows.experts[some], rows.weights[some], [a[some] for a in self.route], [a[some] for a in self.gate]
        self._views[at, n] = views
        return views
