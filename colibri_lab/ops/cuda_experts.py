"""Launches of the second half of a layer: rows grouped by expert, their networks through the page table, the sums.

Picks are (row, expert) pairs, sorted by expert and then by row; a group reads its expert's weights once, finds its rows
by index, and leaves a result a pick. The results are added row by row in ascending order of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .cuda_router import Choice
from .frames import DeviceFrames, Places
from .host_experts import HostExperts
from .launch import Kernels
from .layout import ceil_div
from .products import Activations, Jobs, Paged, Residents, batch_for, job_list, upload
from .types import F32, FFN, I32, ON_CPU, ON_GPU, ExpertPages, LayerWeights, ModelWeights, Rows

Three = tuple[Paged, Paged, Paged]  # gate, up, down


@dataclass(frozen=True)
class Picks:
    """Experts of a wave, in parts that fit on the device; each pick's row and weight; a row's picks from begin[r] on.

    Picks lie expert by expert, in the order of the parts, and those of the processor's experts behind them.
    """

    parts: list[list[int]]
    counts: dict[int, int]  # of picks, by expert
    host: I32  # [Q] expert of each of the processor's picks
    row: I32  # [P], counted from the first row
    weight: np.ndarray[Any, Any]  # float32 [P], in the order of `order`
    begin: I32  # [R + 1]
    order: I32  # [P] picks, row by row


def most_jobs(rows: int, k: int, experts: int) -> int:
    """Of the picks of so many rows, whatever they choose: a job for each that is alone, else one for BATCHES[-1]."""
    picks, batch = rows * k, batch_for([rows])
    return picks if batch == 1 else (picks + (batch - 1) * min(experts, picks)) // batch


@dataclass(frozen=True)
class Sharing:
    """How experts are shared between device and processor. cache_bytes: of device memory, see DeviceFrames; places int8
    [L, E]: see types.ON_GPU, None: all on the device; threads: of the processor, None: all it may use."""

    cache_bytes: int | None = None
    places: Places | None = None
    threads: int | None = None

    def places_of(self, w: ModelWeights) -> Places:
        """places [L, E]; ON_CPU in dense layers, so that they take no room on the device."""
        places = np.full((len(w.layers), w.experts), ON_GPU, np.int8) if self.places is None else self.places.copy()
        places[[layer.gate is None for layer in w.layers]] = ON_CPU
        return places


class Experts:
    """Room for `capacity` rows of the model's widest network."""

    def __init__(self, kernels: Kernels, w: ModelWeights, pages: ExpertPages, capacity: int, residents: Residents,
                 precision: str, sharing: Sharing) -> None:  # fmt: skip
        self._kernels, self._w, self._residents = kernels, w, residents
        d, sparse = kernels.device, any(layer.gate is not None for layer in w.layers)
        most = capacity * max(w.top_k, 1)
        sizes, widest = [], [1]
        self.frames: DeviceFrames | None = None
        if sparse:
            sizes += [(most, Paged(m, None, None, 0)) for m in w.expert]
            widest.append(most * w.expert[0].rows)
        for layer in w.layers:
            for network in filter(None, (layer.dense, layer.shared)):
                sizes += [(capacity, m) for m in self._resident(network)]
                widest.append(capacity * network.gate.layout.rows)
        self._acts = Activations(kernels, precision == "fast", sizes)
        self._gate, self._up, self._hidden = (d.empty((max(widest),), np.float32) for _ in range(3))
        self._y, self._sum = d.empty((most, w.hidden), np.float32), d.empty((capacity, w.hidden), np.float32)
        self._jobs, self._rows = d.empty((most, 4), np.int32), d.empty((most,), np.int32)
        self._order, self._weight = d.empty((most,), np.int32), d.empty((most,), np.float32)
        self._begin = d.empty((capacity + 1,), np.int32)
        self._ones = upload(d, np.ones(capacity, np.float32))
        self._each = upload(d, np.arange(max(most, capacity + 1), dtype=np.int32))  # a pick's hidden values are its own
        self._shared_weight = d.empty((capacity,), np.float32)
        gates = [layer.shared_gate for layer in w.layers]
        self._shared_gates = [None if gate is None else upload(d, gate) for gate in gates]
        self.host: HostExperts | None = None
        self.picks_gpu = self.picks_cpu = 0
        places = sharing.places_of(w)
        if (places[[layer.gate is not None for layer in w.layers]] != ON_GPU).any():
            self.host = HostExperts(w, pages, most, precision, sharing.threads)
        if (places != ON_CPU).any():  # last, since it takes what the card has left
            self.frames = DeviceFrames(d, pages, w.expert[2].pages, w.top_k, sharing.cache_bytes, places)

    def plan(self, layer: int, rows: Rows, some: slice, first: int, last: int) -> Picks | None:
        """Who computes what in this wave. IndexError before anything has changed."""
        if self._w.layers[layer].dense is not None:
            return None
        chosen = checks.indices(rows.experts[some], self._w.experts, "experts")
        row, rank = np.nonzero((chosen >= first) & (chosen < last))
        if not len(row):
            return None
        expert, weight = chosen[row, rank], rows.weights[some][row, rank]
        wanted, counts = np.unique(expert, return_counts=True)
        here, away = ([], wanted.tolist()) if self.frames is None else self.frames.split(layer, wanted.tolist())
        parts = self.frames.parts(layer, here) if self.frames is not None else []
        place = np.zeros(self._w.experts, np.int32)
        place[[*(e for part in parts for e in part), *away]] = np.arange(len(wanted))
        sort = np.lexsort((row, place[expert]))
        expert, weight, of = expert[sort], weight[sort], row[sort].astype(np.int32)
        order = np.lexsort((expert, of)).astype(np.int32)  # a row's picks in ascending order of experts
        begin = np.searchsorted(of[order], np.arange(len(chosen) + 1)).astype(np.int32)
        host = expert[place[expert] >= len(here)]
        by_expert = dict(zip(wanted.tolist(), counts.tolist(), strict=True))
        return Picks(parts, by_expert, host, of, weight[order], begin, order)

    def run(self, layer: int, picks: Picks | None, x: Any, on_host: F32, some: slice, start: bool) -> None:
        """Add a wave's experts of x [n, H] to the layer's sum. on_host: the same rows there. MissingPage."""
        total, n = self._sum[some], some.stop - some.start
        if start:
            self._elementwise("clear", total.size, total)
        if picks is None:
            return
        self._put(self._rows, picks.row)
        at = 0
        for part in picks.parts:
            assert self.frames is not None
            counts = [picks.counts[e] for e in part]
            self.frames.bring(layer, part)
            self._compute(layer, part, counts, x, n, at)
            self.frames.done(layer, part)
            at += sum(counts)
        if len(picks.host):  # while the kernels above run
            assert self.host is not None
            self._put(self._y[at:], self.host.run(layer, on_host[picks.row[at:]], picks.host))
        self.picks_gpu += at
        self.picks_cpu += len(picks.host)
        self._add(self._put(self._begin, picks.begin), self._put(self._order, picks.order),
                  self._put(self._weight, picks.weight), total, n)  # fmt: skip

    def _compute(self, layer: int, part: list[int], counts: list[int], x: Any, n: int, at: int) -> None:
        """The networks of some experts, from pick `at` on."""
        batch, count = batch_for(counts), sum(counts)
        keys = [layer * self._w.experts + e for e in part]
        jobs = self._put(self._jobs, job_list(keys, counts, batch))
        on_rows = Jobs(jobs, self._rows[at : at + count], batch)
        self._network(self._paged(), x, n, on_rows, Jobs(jobs, self._each, batch), count, self._y[at : at + count])

    def run_chosen(self, layer: int, x: Any, chosen: Choice, n: int, live: Any) -> None:
        """The sum of a layer's experts of x [n, H], which the device alone knows: all must be on it (`whole`). live
        int32 [1]: rows that count. Nothing is read from or written to the host."""
        k, experts, total = self._w.top_k, self._w.experts, self._sum[:n]
        batch, picks = batch_for([n]), n * k
        jobs = self._jobs[: most_jobs(n, k, experts)]
        self._kernels("plan_picks", (1, 1, 1), 256, chosen.experts, chosen.weights, live, jobs, self._rows, self._order,
                      self._weight, self._begin, n, k, experts, layer, batch, len(jobs), shared=8 * picks)  # fmt: skip
        self._elementwise("clear", total.size, total)
        self._network(self._paged(), x, n, Jobs(jobs, self._rows, batch), Jobs(jobs, self._each, batch), picks, self._y)
        self._add(self._begin, self._order, self._weight, total, n)

    def clear(self, n: int) -> None:
        """Begin the sum of n rows of a layer without experts of its own."""
        self._elementwise("clear", self._sum[:n].size, self._sum[:n])

    def finish(self, layer: int, x: Any, residual: Any, some: slice) -> None:
        """Add the dense network or the shared expert to the sum, and the sum to the residual stream."""
        block, n, total = self._w.layers[layer], some.stop - some.start, self._sum[some]
        for network in filter(None, (block.dense, block.shared)):
            jobs = self._residents.jobs(n)
            self._network(self._resident(network), x, n, jobs, jobs, n, self._y)
            self._add(self._each[: n + 1], self._each[:n], self._weight_of(block, network, layer, x, n), total, n)
        self._elementwise("add_sum", total.size, residual, total)

    def _weight_of(self, block: LayerWeights, network: FFN, layer: int, x: Any, n: int) -> Any:
        if network is not block.shared or block.shared_gate is None:
            return self._ones
        self._kernels("shared_weight", (n, 1, 1), 32, self._shared_gates[layer], x, self._shared_weight, self._w.hidden)
        return self._shared_weight

    def _paged(self) -> Three:
        assert self.frames is not None
        frames, table, pages = self.frames.frames, self.frames.table, self._w.expert[2].pages
        gate, up, down = (Paged(m, frames, table, pages) for m in self._w.expert)
        return gate, up, down

    def _network(self, m: Three, x: Any, n: int, on_rows: Jobs, on_picks: Jobs, picks: int, y: Any) -> None:
        """y [picks, H] = down(silu(gate x) * up x)."""
        gate, up, down = m
        width = gate.layout.rows
        self._acts.prepare(x, n, gate)
        self._acts.product(x, gate, on_rows, self._gate)
        self._acts.product(x, up, on_rows, self._up)
        self._kernels("swiglu", (ceil_div(width, 256), picks, 1), 256, self._gate, self._up, self._hidden, width)
        self._acts.prepare(self._hidden, picks, down)
        self._acts.product(self._hidden, down, on_picks, y)

    def _add(self, begin: Any, order: Any, weight: Any, total: Any, n: int) -> None:
        self._kernels("add_picks", (ceil_div(self._w.hidden, 256), n, 1), 256, self._y, begin, order, weight, total,
                      self._w.hidden)  # fmt: skip

    def counters(self) -> dict[str, int]:
        """(row, expert) pairs by where they were computed, and see DeviceFrames.counters."""
        frames = {} if self.frames is None else self.frames.counters()
        return {"picks_gpu": self.picks_gpu, "picks_cpu": self.picks_cpu, **frames}

    def close(self) -> None:
        if self.host is not None:
            self.host.close()

    def _elementwise(self, name: str, size: int, *arrays: Any) -> None:
        self._kernels(name, (ceil_div(size, 256), 1, 1), 256, *arrays, size)

    def _resident(self, network: FFN) -> Three:
        gate, up, down = (self._residents.matrix(m) for m in (network.gate, network.up, network.down))
        return gate, up, down

    def _put(self, room: Any, values: np.ndarray[Any, Any]) -> Any:
        target = room[: len(values)]
        self._kernels.device.write(target, np.ascontiguousarray(values, room.dtype))
        return target
