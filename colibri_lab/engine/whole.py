"""Decode steps that the GPU does at one go, and whose books are kept afterwards: what `cuda_graphs` switches.

All experts must be on the device then. While there is room for all of them and some have not been asked for yet, steps
go layer by layer as ever and bring a few more each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from time import perf_counter_ns as clock

import numpy as np

from ..dispatch.waves import Dispatcher
from ..errors import ConfigError
from ..model.transformer import Transformer
from ..ops.cuda import CudaBackend
from ..pager.pager import Pager

BRING = 64 << 20  # bytes of experts that a step brings while some are missing
REASONS = ("prompt", "batch", "experts", "settings")  # why a step went without a graph


class WholeSteps:
    """Stands before `Transformer.forward`: True where the step is done. why: what speaks against graphs, for good."""

    def __init__(self, backend: CudaBackend, pager: Pager, dispatch: Dispatcher, sparse: Sequence[bool],
                 foreign: bool, asked: str) -> None:  # fmt: skip
        """foreign: whether a router runs outside the backend; asked: the setting, auto or on or off. ConfigError where
        it is on and cannot be."""
        self._backend, self._pager, self._dispatch, self._sparse = backend, pager, dispatch, tuple(sparse)
        self.why = "the router is a plugin" if foreign else backend.graphless()
        if asked == "on" and self.why:
            raise ConfigError(f"settings: cuda_graphs: on, but {self.why}; leave it out, or set auto")
        self._without = dict.fromkeys(REASONS, 0)

    def __call__(self, t: Transformer, n: int, seats: Sequence[int]) -> bool:
        """The step of `Transformer.forward`, or nothing."""
        against = self._against(t, n, seats)
        if against:
            self._without[against] += 1
            return False
        waited = self._pager.wait_ns
        t.kv.begin(seats)
        self._backend.run_whole(n)
        ran = clock()
        for layer, sparse in enumerate(self._sparse):
            self._keep_books(t, layer, sparse, n)
        if t.pressed:
            raise KeyboardInterrupt
        self._backend.whole.settle()
        t.attention_ns = t.router_ns = t.experts_ns = 0  # it is not divided: what the device took is `other`
        t.io_ns = self._pager.wait_ns - waited
        t.dispatch_ns = clock() - ran - t.io_ns
        return True

    def _against(self, t: Transformer, n: int, seats: Sequence[int]) -> str:
        """What speaks against a graph for this step; empty for nothing."""
        if self.why or t.backend is not self._backend:
            return "settings"
        if not self._pager.decode:
            return "prompt"
        if n > self._backend.whole.most or len(set(seats)) < n:
            return "batch"
        tier = self._backend.tier
        assert tier is not None
        if tier.absent():
            self._bring()
            return "experts"
        tier.arrived()
        return ""

    def _bring(self) -> None:
        """Some of the experts that are missing, as if they had been asked for."""
        tier, pager = self._backend.tier, self._pager
        assert tier is not None
        many = max(1, BRING // pager.frames.run_bytes)
        for layer, group in groupby(tier.absent()[:many], key=lambda at: at[0]):
            experts = [e for _, e in group]
            for first in range(0, len(experts), pager.room):
                some = experts[first : first + pager.room]
                pager.acquire(layer, some)
                tier.bring(layer, some)
                tier.done(layer, some)

    def _keep_books(self, t: Transformer, layer: int, sparse: bool, n: int) -> None:
        """What `forward` does between a layer's kernels, from what the device found."""
        whole, rows, tier = self._backend.whole, t.rows, self._backend.tier
        assert tier is not None
        if not sparse:
            t.kv.place(layer, [-1] * n)
        else:
            experts, weights = whole.chosen(layer)
            np.copyto(t.route[layer, :n], experts)
            np.copyto(t.gate[layer, :n], weights)
            chosen = experts.tolist()
            t.kv.place(layer, [row[0] for row in chosen])
            if n > 1:
                self._pager.chosen(layer, chosen)
            for _, _, wanted in self._dispatch.split(chosen, self._pager.room):
                self._pager.acquire(layer, wanted)
                tier.touched(layer, wanted)
        whole.target[layer, :n] = rows.kv_dst[:n]

    def counters(self) -> dict[str, int]:
        """Steps without a graph, by what spoke against it."""
        return {f"steps_without_graph_{why}": count for why, count in self._without.items()}

    def describe(self) -> str:
        """In words."""
        return f"none: {self.why}" if self.why else f"for decode steps of up to {self._backend.whole.most} sequences"
