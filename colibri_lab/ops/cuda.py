"""The GPU backend's launches. What it runs on is a device.Device: a card's, or the simulator's (backend: sim).

Weights, keys and values, expert frames and the residual stream live on the device; of a step's results the host reads
what the engine looks at. Sums depend on a row alone (kernels/README.md), so batches and waves change no bit.
"""

from __future__ import annotations

from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from . import checks
from .cuda_experts import Experts, Sharing
from .cuda_router import RouterLaunches
from .device import Device
from .frames import DeviceFrames
from .launch import LANE_DIMS, Kernels
from .layout import ceil_div
from .products import Activations, Paged, Residents, upload
from .types import Binding, ExpertPages, KVPool, LayerWeights, ModelWeights, NonFiniteLogits, Rows

SPLIT = 256  # tokens of a block of attention, as in attention.cu
WARPS = 8  # of a block that sums over a row; one float of shared memory each
NO_NORM, PER_HEAD, FLAT = 0, 1, 2  # as in project_heads.cu
NOT_FINITE, BAD_INDEX = 1, 2  # status of a row, as in common.cuh


class CudaBackend:
    """See types.Backend. `kernels.launches` counts launches, `experts.frames` the transfers of pages."""

    isa = "cuda"

    def __init__(self, device: Device, precision: str = "fast", sharing: Sharing | None = None) -> None:
        """sharing: of experts between device and processor; None: all are on the device as far as it has room."""
        self._sharing = sharing or Sharing()
        self.precision = checks.precision(precision)
        self.device, self.name = device, device.name
        self.kernels = Kernels(device)
        self._bound: Binding | None = None

    def bind(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        checks.bind(weights, kv, pages, rows)
        if kv.k.shape[2] > 32 * LANE_DIMS[-1]:
            raise ValueError(f"head_dim {kv.k.shape[2]} is more than the {32 * LANE_DIMS[-1]} of attention's kernels")
        if self._bound is not None:
            self._bound = None
            self.device.release()
        try:
            self._take(weights, kv, pages, rows)
        except BaseException:  # not enough memory, or Ctrl-C: nothing of it stays on the device
            self.device.release()
            raise
        self._bound = Binding(weights, kv, pages, rows)

    def _take(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        """All memory of the device that will ever be needed, and what is resident there."""
        w, r, d = weights, rows.capacity, self.device
        self._half = "half_t" if kv.k.dtype == np.float16 else "float"
        self._residents = Residents(d, r)
        self._vectors = {id(v): upload(d, v) for v in vectors(w)}
        self._zeros = upload(d, np.zeros(max(w.hidden, *(m.attention.qkv.layout.rows for m in w.layers)), np.float32))
        self._k, self._v = upload(d, kv.k), upload(d, kv.v)
        self._where, self._first = upload(d, kv.where), upload(d, kv.first)
        self._cos, self._sin = upload(d, w.cos), upload(d, w.sin)
        self._head = self._residents.matrix(w.head)
        self._table = None if w.embedding is None else upload(d, w.embedding)
        self._make_room(weights, kv, rows)
        self.router = RouterLaunches(self.kernels, w, r)
        mine = [(r, self._residents.matrix(m)) for layer in w.layers for m in (layer.attention.qkv, layer.attention.o)]
        fast = self.precision == "fast"
        self._acts = Activations(self.kernels, fast, [*mine, (r, self._head)])
        self.experts = Experts(self.kernels, w, pages, r, self._residents, self.precision, self._sharing)

    def _make_room(self, w: ModelWeights, kv: KVPool, rows: Rows) -> None:
        r, d = rows.capacity, self.device
        heads, dim = max(layer.attention.heads for layer in w.layers), kv.k.shape[2]
        qkv = max(layer.attention.qkv.layout.rows for layer in w.layers)

        def room(*shape: int) -> Any:
            return d.empty(shape, np.float32)

        self._x, self._ffn_in, self._normed, self._out = (room(r, w.hidden) for _ in range(4))
        self._qkv, self._attended = room(r * qkv), room(r * heads * dim)
        self._splits = ceil_div(kv.where.shape[2], SPLIT)
        self._parts = room(r * self._splits * heads * (2 + dim))
        self._logits, self._logsumexp = room(r, w.vocab), room(r)
        self._sight = d.empty((r * kv.where.shape[2],), np.int32) if kv.recent else None
        self._ints = {name: d.empty((r,), np.int32) for name in ("token", "seat", "position", "count", "status", "out")}
        self._argmax, self._begin = d.empty((r,), np.int32), d.empty((r,), np.int64)

    @property
    def tier(self) -> DeviceFrames | None:
        """Experts on the device; None where none comes there."""
        return self.experts.frames

    def counters(self) -> dict[str, int]:
        """Of experts on the device, and of memory and transfers."""
        return {**self.device.counters(), **self.experts.counters()}

    def _all(self) -> Binding:
        if self._bound is None:
            raise RuntimeError("the backend is not bound")
        return self._bound

    def embed(self, n: int) -> None:
        b = self._all()
        token = self._int("token", checks.indices(b.rows.token[:n], b.weights.vocab, "token"))
        if self.experts.frames is not None:
            self.experts.frames.next_step()
        hidden, head = b.weights.hidden, self._head
        grid = (ceil_div(hidden, 256), n, 1)
        if b.weights.embedding is not None:
            kind = "half_t" if b.weights.embedding.dtype == np.float16 else "float"
            self.kernels(f"embed<{kind}>", grid, 256, self._table, token, self._x, hidden)
        else:
            group = head.layout.group if head.layout.quantised else 0
            self.kernels(f"embed_tiles<{head.format}>", grid, 256, head.frames, head.tables, token, self._x, hidden,
                         group, *head.place, head.layout.tile_cols)  # fmt: skip

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        b = self._all()
        w, kv, rows, block = b.weights, b.kv, b.rows, b.weights.layers[layer]
        checks.positions(rows, kv, w, at, n)
        if n == 0:
            return
        some = slice(at, at + n)
        self._seat, self._position = self._int("seat", rows.seat[some]), self._int("position", rows.position[some])
        self._status = self._int("status", np.zeros(n, np.int32))
        self._project(block, layer, n, at)
        guessed = self._look(block, layer, n, at)
        self._attend(block, n)
        a, x = block.attention, self._x[some]
        self._multiply(self._residents.matrix(a.o), self._attended, n, self._out)
        self.kernels("add_rms_norm", (n, 1, 1), 256, x, self._out, self._vector(a.o_bias),
                     self._vector(block.post_norm), self._ffn_in[some], w.hidden, w.norm_eps,
                     shared=4 * WARPS)  # fmt: skip
        self._raise(layer, at)  # a wrong table, before the router counts anything
        if block.gate is not None:
            begin = clock()  # what came before is done: its status was read
            self.router.choose(layer, self._ffn_in[some], n, self._status)
            self._raise(layer, at)
            self.router.read(layer, rows, some)
            rows.spent[0] += clock() - begin
        for target, source in ((rows.x, self._x), (rows.ffn_in, self._ffn_in)):
            target[some] = self.device.read(source[some])
        self._count(block, layer, guessed, some)

    def expert_ffn(self, layer: int, n: int, first: int, last: int, at: int = 0) -> None:
        b = self._all()
        if n == 0:
            return
        some = slice(at, at + n)
        begin = clock()
        picks = self.experts.plan(layer, b.rows, some, first, last)
        b.rows.spent[1] += clock() - begin
        if first == 0:
            self._settle(layer, n, at)
        self.experts.run(layer, picks, self._ffn_in[some], b.rows.ffn_in[some], some, start=first == 0)
        if b.weights.layers[layer].dense is not None or last == b.weights.experts:
            self.experts.finish(layer, self._ffn_in[some], self._x[some], some)
            b.rows.x[some] = self.device.read(self._x[some])

    def head(self, n: int) -> None:
        b = self._all()
        out = self._int("out", checks.indices(b.rows.out_row[:n], b.rows.capacity, "out_row"))
        if n == 0:
            return
        w, rows = b.weights, b.rows
        self.kernels("rms_norm", (n, 1, 1), 256, self._x, out, self._vector(w.final_norm), self._normed, w.hidden,
                     w.norm_eps, shared=4 * WARPS)  # fmt: skip
        self._multiply(self._head, self._normed, n, self._logits)
        self.kernels("finish_logits", (n, 1, 1), 256, self._logits, self._argmax, self._logsumexp, w.vocab,
                     shared=4 * WARPS)  # fmt: skip
        for target, source in ((rows.logits, self._logits), (rows.argmax, self._argmax),
                               (rows.logsumexp, self._logsumexp)):  # fmt: skip
            target[:n] = self.device.read(source[:n])

    def close(self) -> None:
        if self._bound is not None:
            self._bound = None
            self.experts.close()
        self.device.close()

    def _project(self, block: LayerWeights, layer: int, n: int, at: int) -> None:
        """Queries stay in self._qkv; keys and values go to staging, and the host's tables say so too."""
        b, a = self._all(), block.attention
        w, kv, rows = b.weights, b.kv, b.rows
        self.kernels("rms_norm", (n, 1, 1), 256, self._x, self._residents.rows[at:], self._vector(block.input_norm),
                     self._normed, w.hidden, w.norm_eps, shared=4 * WARPS)  # fmt: skip
        self._multiply(self._residents.matrix(a.qkv), self._normed, n, self._qkv)
        norms = [NO_NORM if v is None else PER_HEAD if len(v) == a.head_dim else FLAT for v in (a.q_norm, a.k_norm)]
        self.kernels(f"project_heads<{self._half}>", (n, 1, 1), 128, self._qkv, self._vector(a.qkv_bias),
                     self._vector(a.q_norm), self._vector(a.k_norm), self._cos, self._sin, self._seat, self._position,
                     self._k, self._v, self._where, self._first, a.heads, a.kv_heads, a.head_dim, *norms,
                     w.norm_eps, np.inf if a.clip is None else a.clip, layer, len(w.layers), kv.where.shape[2],
                     kv.staging + at, shared=4 * WARPS)  # fmt: skip
        for r in range(at, at + n):
            kv.where[rows.seat[r], layer, rows.position[r]] = kv.staging + r
            kv.first[rows.seat[r], layer, rows.position[r]] = -1

    def _look(self, block: LayerWeights, layer: int, n: int, at: int) -> np.ndarray[Any, Any]:
        """Set which tokens each row sees; which rows [n] had their experts guessed for it."""
        b = self._all()
        kv, w, window, past = b.kv, b.weights, block.attention.window, b.rows.position[at : at + n] + 1
        begin = np.maximum(past - window, 0) if window else np.zeros(n, np.int32)
        self._reach = past - begin
        positions, seat = kv.where.shape[2], b.rows.seat[at : at + n].astype(np.int64)
        if not kv.recent or block.gate is None:
            self._list = self._where
            self._upload(self._begin, (seat * len(w.layers) + layer) * positions + begin)
            self._counts = self._int("count", self._reach.astype(np.int32))
            return np.zeros(n, bool)
        guess = self.router.guess(layer, self._x, self._residents.rows[at:], self._vector(block.post_norm), n)
        self._list, self._counts = self._sight, self._ints["count"][:n]
        self._upload(self._begin, np.arange(n, dtype=np.int64) * positions)
        self.kernels("collect_sight", (n, 1, 1), 32, self._where, self._first, guess, self._seat, self._position,
                     self._sight, self._counts, self._status, w.top_k, w.experts, layer, len(w.layers), positions,
                     window, kv.recent, kv.sinks)  # fmt: skip
        between: np.ndarray[Any, Any] = np.maximum(begin, kv.sinks) < past - kv.recent
        return between

    def _attend(self, block: LayerWeights, n: int) -> None:
        a, tokens = block.attention, len(self._all().kv.k)
        splits, wide = ceil_div(int(self._reach.max()), SPLIT), 2 + a.head_dim
        lanes = next(m for m in LANE_DIMS if 32 * m >= a.head_dim)
        self.kernels(f"attention<{self._half}, {lanes}>", (splits, a.heads, n), 128, self._qkv, self._k, self._v,
                     self._list, self._begin, self._counts, self._parts, self._status, a.heads, a.kv_heads, a.head_dim,
                     (a.heads + 2 * a.kv_heads) * a.head_dim, tokens, a.scale, shared=4 * 4 * wide)  # fmt: skip
        self.kernels("attention_merge", (a.heads, n, 1), 128, self._parts, self._counts, self._attended, a.heads,
                     a.head_dim, splits)  # fmt: skip

    def _settle(self, layer: int, n: int, at: int) -> None:
        """K/V of the rows to their slots, on the device; the tables on both sides."""
        b = self._all()
        kv, rows, some = b.kv, b.rows, slice(at, at + n)
        dense = b.weights.layers[layer].dense is not None
        target = checks.indices(rows.kv_dst[some], len(kv.k), "kv_dst")
        expert = np.full(n, -1, np.int32) if dense else rows.experts[some, 0].copy()
        width = kv.k.shape[1] * kv.k.shape[2]
        seat, position = self._int("seat", rows.seat[some]), self._int("position", rows.position[some])
        self.kernels(f"settle_rows<{self._half}>", (n, 1, 1), 128, self._k, self._v, self._int("out", target), seat,
                     position, self._int("count", expert), self._where, self._first, width, layer,
                     len(b.weights.layers), kv.where.shape[2], kv.staging + at)  # fmt: skip
        kv.where[rows.seat[some], layer, rows.position[some]] = target
        kv.first[rows.seat[some], layer, rows.position[some]] = expert

    def _count(self, block: LayerWeights, layer: int, guessed: np.ndarray[Any, Any], some: slice) -> None:
        b = self._all()
        seen, recalled = self.device.read(self._counts), 0
        if guessed.any():
            guess = self.router.guesses(len(guessed))
            recalled = int((guess == b.rows.experts[some, :1]).any(axis=1)[guessed].sum())
        b.kv.seen[layer] += (int(seen.sum()), int(self._reach.sum()), int(guessed.sum()), recalled)

    def _raise(self, layer: int, at: int) -> None:
        status = self.device.read(self._status)
        for r in np.flatnonzero(status)[:1]:
            if status[r] == NOT_FINITE:
                raise NonFiniteLogits(layer, at + int(r))
            raise IndexError(f"where is outside its range (at {r})")

    def _multiply(self, m: Paged, x: Any, n: int, y: Any) -> None:
        self._acts.prepare(x, n, m)
        self._acts.product(x, m, self._residents.jobs(n), y)

    def _vector(self, host: Any) -> Any:
        """A weight vector on the device; zeros for none."""
        return self._zeros if host is None else self._vectors[id(host)]

    def _int(self, name: str, values: np.ndarray[Any, Any]) -> Any:
        return self._upload(self._ints[name], values)

    def _upload(self, room: Any, values: np.ndarray[Any, Any]) -> Any:
        target = room[: len(values)]
        self.device.write(target, np.ascontiguousarray(values, room.dtype))
        return target


def vectors(w: ModelWeights) -> list[Any]:
    """Norms and biases, all that `_vector` is asked for."""
    parts = [(m.input_norm, m.post_norm, m.attention.qkv_bias, m.attention.o_bias, m.attention.q_norm,
              m.attention.k_norm) for m in w.layers]  # fmt: skip
    return [w.final_norm, *(v for part in parts for v in part if v is not None)]
