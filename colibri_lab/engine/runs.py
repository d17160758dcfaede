"""Steps in which nobody has to come between a layer's router and its experts: layers at one go, their books afterwards.

The backend goes on as long as the experts that it chooses are in memory, and comes back where one is not. Between two
layers Python costs more than twice of what it costs over all of them at once, since a layer's weights push it out of
the caches: 45 us a layer against 15 to 20 on one core, where m1's kernels take 600.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as clock

from ..dispatch.waves import Dispatcher
from ..model.transformer import Transformer
from ..ops.runs import RUN_ROWS, Running
from ..pager.pager import Pager


class LayerRuns:
    """Stands before `Transformer.forward`: True where the step is done, with the tokens that it would have given."""

    def __init__(self, backend: Running, pager: Pager, dispatch: Dispatcher, sparse: Sequence[bool],
                 asynchronous: bool) -> None:  # fmt: skip
        """asynchronous: a pipeline is there for steps that read, and hides more of it."""
        self._backend, self._pager, self._dispatch, self._sparse = backend, pager, dispatch, tuple(sparse)
        self._asynchronous = asynchronous
        self._read = -1  # bytes when the last step was begun; before the first one, none that there can be

    def __call__(self, t: Transformer, n: int, seats: Sequence[int]) -> bool:
        """The step of `Transformer.forward`, or nothing."""
        if not self._can(t, n):
            return False
        backend, pager, runs, last = self._backend, self._pager, self._backend.runs, len(self._sparse)
        waited, (chose, grouped), (attended, computed) = pager.wait_ns, t.rows.spent.tolist(), runs.spent.tolist()
        begin, layer = clock(), 0
        t.kv.begin(seats)
        backend.embed(n)
        while layer < last:
            lacking = backend.run_layers(layer, n)
            self.keep_books(t, layer, min(lacking + 1, last), n)  # reads what the last of them lacks
            backend.settle_layers(layer, lacking, n)
            if t.pressed:
                raise KeyboardInterrupt
            if lacking < last:
                start = clock()
                backend.expert_ffn(lacking, n, 0, t.rows.router_logits.shape[1])
                computed -= clock() - start
            layer = lacking + 1
        (chosen_ns, grouped_ns), (attended_ns, computed_ns) = t.rows.spent.tolist(), runs.spent.tolist()
        t.io_ns, t.router_ns = pager.wait_ns - waited, chosen_ns - chose
        t.attention_ns = attended_ns - attended - t.router_ns
        t.experts_ns = computed_ns - computed - (grouped_ns - grouped)
        t.dispatch_ns = clock() - begin - t.attention_ns - t.router_ns - t.experts_ns - t.io_ns
        return True

    def _can(self, t: Transformer, n: int) -> bool:
        """Whether nobody wants to be asked between the layers, and the rows' experts fit into memory at once.

        Prefetchers and the pipeline want to be, while there is anything to read: not when all experts are in memory,
        nor, where all have room, after a step that read nothing; some may never be asked for.
        """
        pager = self._pager
        still, self._read = pager.all_bytes == self._read, pager.all_bytes
        if t.backend is not self._backend or n > RUN_ROWS or n * self._dispatch.top_k > pager.room:
            return False
        return pager.full or (pager.fits_all and still) or not (self._asynchronous or t.reads_ahead)

    def keep_books(self, t: Transformer, first: int, last: int, n: int) -> None:
        """What `forward` does between the kernels of layers first <= l < last."""
        runs, some = self._backend.runs, slice(first, last)
        experts = runs.experts[some, :n]
        t.route[some, :n], t.gate[some, :n] = experts, runs.weights[some, :n]
        places = []
        for layer, chosen in enumerate(experts.tolist(), first):
            if not self._sparse[layer]:
                places.append(t.kv.place(layer, [-1] * n))
                continue
            places.append(t.kv.place(layer, [row[0] for row in chosen]))
            if n > 1:
                self._pager.chosen(layer, chosen)
            for _, _, wanted in self._dispatch.split(chosen, self._pager.room):
                self._pager.acquire(layer, wanted)
        runs.kv_dst[some, :n] = places
