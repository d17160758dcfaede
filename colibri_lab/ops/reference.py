"""The oracle: every operation of a backend in plain NumPy, one row at a time, clarity before speed.

Shape legend as in types.py. A row is computed alone, so its result cannot depend on the rows beside it.
"""

from __future__ import annotations

from time import perf_counter_ns as clock
from time import sleep

import numpy as np
from numpy.typing import NDArray

from . import checks, route
from .int8 import matmul_int8
from .pack import unpack
from .routing import Routing, gate_codes
from .types import (
    COMING,
    F32,
    FFN,
    I32,
    AttentionWeights,
    ExpertPages,
    KVPool,
    LayerWeights,
    Matrix,
    MissingPage,
    ModelWeights,
    NonFiniteLogits,
    Rows,
)

Sight = tuple[list[int], int]  # a row's guessed experts, and how many tokens it attends to


class ReferenceBackend:
    """See types.Backend. precision "exact": float32 activations; "fast": int8 ones where weights are int8 or int4."""

    name = "reference"
    isa = "numpy"

    def __init__(self, precision: str = "exact") -> None:
        self.precision = checks.precision(precision)
        self._dense: dict[int, F32] = {}  # float32 copies of the resident matrices, by id of the matrix

    def bind(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        checks.bind(weights, kv, pages, rows)
        self.weights, self.kv, self.pages, self.rows = weights, kv, pages, rows
        self._routing = weights.routing or Routing.make(len(weights.layers))
        self._codes = {
            i: gate_codes(layer.gate, self._routing.bits)
            for i, layer in enumerate(weights.layers)
            if layer.gate is not None and self._routing.kind == "two_stage"
        }
        self._sum = np.zeros_like(rows.x)  # [R, H] the layer's sum of experts
        self._found: dict[int, NDArray[np.int64] | None] = {}  # by row, of two_stage's first stage
        self._staged: tuple[int, int, int, list[Sight]] | None = None  # layer, n, at between its two
        self._dense.clear()

    def embed(self, n: int) -> None:
        table = self.weights.embedding
        if table is None:
            table = self._values(self.weights.head)
        self.rows.x[:n] = table[checks.indices(self.rows.token[:n], self.weights.vocab, "token")]

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        if layer in self._codes:
            self.first_stage(layer, n, at)
            self.second_stage(layer, n, at)
        else:
            self._choose(layer, n, at, self._attends(layer, n, at))

    def first_stage(self, layer: int, n: int, at: int = 0) -> None:
        """See types.Staged."""
        if layer not in self._codes:
            raise IndexError(f"layer is outside its range (at {layer})")
        sights, rows, k = self._attends(layer, n, at), self.rows, self.weights.top_k
        begin = clock()
        for r in range(at, at + n):
            found = route.first_stage(self._codes[layer], rows.ffn_in[r], k, self._routing.bits)
            self._found[r], rows.experts[r] = found
        rows.spent[0] += clock() - begin
        self._staged = layer, n, at, sights

    def second_stage(self, layer: int, n: int, at: int = 0) -> None:
        """See types.Staged."""
        staged, self._staged = self._staged, None
        if staged is None or staged[:3] != (layer, n, at):
            raise IndexError(f"n is outside its range (at {n})")
        self._choose(*staged)

    def _attends(self, layer: int, n: int, at: int) -> list[Sight]:
        """All before the router."""
        w, rows = self.weights, self.rows
        block, self._staged = w.layers[layer], None
        checks.positions(rows, self.kv, w, at, n)
        some, sights = range(at, at + n), list[Sight]()
        queries = [self._project(block, layer, r) for r in some]  # all keys are written before the first row looks
        for r in some:
            guess, seen = self._look(block, layer, r)
            attended = self._attend(block.attention, layer, r, queries[r - at], seen)
            out = self._matmul(block.attention.o, attended)
            if block.attention.o_bias is not None:
                out = out + block.attention.o_bias
            rows.x[r] += out
            rows.ffn_in[r] = rms_norm(rows.x[r], block.post_norm, w.norm_eps)
            sights.append((guess, len(seen)))
        return sights

    def _choose(self, layer: int, n: int, at: int, sights: list[Sight]) -> None:
        block = self.weights.layers[layer]
        for r, (guess, seen) in enumerate(sights, at):
            if block.gate is not None:
                begin = clock()
                self._route(block.gate, layer, r)
                self.rows.spent[0] += clock() - begin
            recalled = int(self.rows.experts[r, 0] in guess) if guess else 0
            self.kv.seen[layer] += (seen, self._reach(block.attention, r), len(guess) > 0, recalled)

    def _route(self, gate: F32, layer: int, r: int) -> None:
        w, rows, routing, x = self.weights, self.rows, self._routing, self.rows.ffn_in[r]
        k, normalise, bits = w.top_k, w.normalise_top_k, routing.bits
        logits = exact = gate @ x  # [E]
        try:
            if routing.kind == "int8_lut":
                choice = route.int8_lut(logits, k, normalise, bits)
            elif routing.kind == "bit_level":
                choice = route.bit_level(logits, k, normalise)
            elif routing.kind == "two_stage":
                choice, logits = route.second_stage(gate, self._found[r], x, k, normalise)
            else:
                choice = route.softmax(logits, k, normalise)
        except route.NotFinite:
            raise NonFiniteLogits(layer, r) from None
        rows.router_logits[r], rows.experts[r], rows.weights[r] = logits, choice.experts, choice.weights
        counted = dict(choice.counted)
        if routing.audit:
            right = set(route.top_k(exact, k).tolist())
            counted |= {"audited": 1, "wrong_selections": int(set(choice.experts.tolist()) != right)}
        routing.add(layer, choice.low, choice.top, **counted)

    def expert_ffn(self, layer: int, n: int, first: int, last: int, at: int = 0) -> None:
        rows, kv, block = self.rows, self.kv, self.weights.layers[layer]
        dense = block.dense is not None
        if n == 0:
            return
        some, staged = slice(at, at + n), slice(kv.staging + at, kv.staging + at + n)
        begin, waited = clock(), int(self.pages.waited[0])
        used = {} if dense else self._used(layer, some, first, last)
        rows.spent[1] += clock() - begin - (int(self.pages.waited[0]) - waited)
        if first == 0:
            self._sum[some] = 0
            target = checks.indices(rows.kv_dst[some], len(kv.k), "kv_dst")
            kv.k[target] = kv.k[staged]
            kv.v[target] = kv.v[staged]
            kv.where[rows.seat[some], layer, rows.position[some]] = target
            kv.first[rows.seat[some], layer, rows.position[some]] = -1 if dense else rows.experts[some, 0]
        for expert, chosen in used.items():  # ascending, so each row adds its experts in ascending index
            run = self.pages.frames[self._frames(layer, expert)].reshape(-1)
            gate, up, down = (Matrix(layout, run) for layout in self.weights.expert)
            for r, rank in chosen:
                self._sum[r] += rows.weights[r, rank] * self._swiglu(FFN(gate, up, down), rows.ffn_in[r], paged=True)
        if dense or last == self.weights.experts:
            for r in range(at, at + n):
                self._finish(block, r)

    def head(self, n: int) -> None:
        w, rows = self.weights, self.rows
        wanted = checks.indices(rows.out_row[:n], rows.capacity, "out_row")
        for i, r in enumerate(wanted):
            logits = self._matmul(w.head, rms_norm(rows.x[r], w.final_norm, w.norm_eps))
            top = logits.max()
            rows.logits[i] = logits
            rows.argmax[i] = int(logits.argmax())
            rows.logsumexp[i] = top + np.log(np.exp(logits - top).sum())

    def close(self) -> None:
        self._dense.clear()

    def _project(self, block: LayerWeights, layer: int, r: int) -> F32:
        """Queries [heads, D] of row r; its key and value go to staging in the pool's dtype."""
        a, w, rows, kv = block.attention, self.weights, self.rows, self.kv
        split = a.heads * a.head_dim, (a.heads + a.kv_heads) * a.head_dim
        qkv = self._matmul(a.qkv, rms_norm(rows.x[r], block.input_norm, w.norm_eps))
        if a.qkv_bias is not None:
            qkv = qkv + a.qkv_bias
        q, k, v = qkv[: split[0]], qkv[split[0] : split[1]], qkv[split[1] :]
        if a.q_norm is not None and a.k_norm is not None:
            q = rms_norm(q.reshape(-1, len(a.q_norm)), a.q_norm, w.norm_eps).reshape(-1)
            k = rms_norm(k.reshape(-1, len(a.k_norm)), a.k_norm, w.norm_eps).reshape(-1)
        if a.clip is not None:
            limit = np.float32(a.clip)
            q, k, v = (np.clip(t, -limit, limit) for t in (q, k, v))
        p = rows.position[r]
        kv.k[kv.staging + r] = rotate(k.reshape(-1, a.head_dim), w.cos[p], w.sin[p])
        kv.v[kv.staging + r] = v.reshape(-1, a.head_dim)
        kv.where[rows.seat[r], layer, p] = kv.staging + r
        kv.first[rows.seat[r], layer, p] = -1
        return rotate(q.reshape(-1, a.head_dim), w.cos[p], w.sin[p])

    def _reach(self, a: AttentionWeights, r: int) -> int:
        """How many positions lie in the row's window, itself among them."""
        past = int(self.rows.position[r]) + 1
        return min(past, a.window) if a.window else past

    def _look(self, block: LayerWeights, layer: int, r: int) -> tuple[list[int], I32]:
        """(guessed experts, pool indices [T] that the row attends to); see KVPool. No guess where all is seen."""
        kv, rows, w, end = self.kv, self.rows, self.weights, int(self.rows.position[r]) + 1
        begin = end - self._reach(block.attention, r)
        at = np.arange(begin, end)
        near = (at < kv.sinks) | (at >= end - kv.recent)
        seen, guess = checks.indices(kv.where[rows.seat[r], layer, begin:end], len(kv.k), "where"), list[int]()
        if kv.recent and block.gate is not None and not near.all():
            first = kv.first[rows.seat[r], layer, begin:end].astype(np.int32)
            checks.indices(first + 1, w.experts + 1, "first")
            guess = route.top_k(block.gate @ rms_norm(rows.x[r], block.post_norm, w.norm_eps), w.top_k).tolist()
            seen = seen[near | np.isin(first, [-1, *guess])]
        return guess, seen

    def _attend(self, a: AttentionWeights, layer: int, r: int, queries: F32, at: I32) -> F32:
        kv = self.kv
        keys, values = kv.k[at].astype(np.float32), kv.v[at].astype(np.float32)  # [T, KVH, D]
        out = np.empty((a.heads, a.head_dim), np.float32)
        for h in range(a.heads):
            group = h // (a.heads // a.kv_heads)
            scores = keys[:, group] @ queries[h] * np.float32(a.scale)  # [T]
            weights = np.exp(scores - scores.max())
            out[h] = weights @ values[:, group] / weights.sum()
        return out.reshape(-1)

    def _used(self, layer: int, some: slice, first: int, last: int) -> dict[int, list[tuple[int, int]]]:
        """expert -> [(row, rank)] for experts first <= e < last, ascending; MissingPage before anything is computed."""
        experts = checks.indices(self.rows.experts[some], self.weights.experts, "experts")
        used: dict[int, list[tuple[int, int]]] = {}
        for e in np.unique(experts[(experts >= first) & (experts < last)]):
            frames, begin = self._frames(layer, int(e)), clock()
            while (frames == COMING).any():  # all of an expert at once here, in place of page by page
                sleep(2e-5)
                self.pages.waited[0] += -begin + (begin := clock())
            if (frames < 0).any() or (frames >= len(self.pages.frames)).any():
                raise MissingPage(f"layer {layer} expert {e} is not in memory")
            used[int(e)] = [(some.start + int(r), int(rank)) for r, rank in np.argwhere(experts == e)]
        return used

    def _frames(self, layer: int, expert: int) -> I32:
        """The frames of an expert's pages; the table may have room for more."""
        return self.pages.table[layer, expert, : self.weights.expert[2].pages]

    def _finish(self, block: LayerWeights, r: int) -> None:
        x = self.rows.ffn_in[r]
        if block.dense is not None:
            self._sum[r] += self._swiglu(block.dense, x)
        if block.shared is not None:
            weight = np.float32(1)
            if block.shared_gate is not None:
                weight = np.float32(1) / (np.float32(1) + np.exp(-(block.shared_gate @ x)))
            self._sum[r] += weight * self._swiglu(block.shared, x)
        self.rows.x[r] += self._sum[r]

    def _swiglu(self, f: FFN, x: F32, paged: bool = False) -> F32:
        g, u = self._matmul(f.gate, x, paged), self._matmul(f.up, x, paged)
        with np.errstate(over="ignore"):  # exp(-g) may be inf: silu is then -0
            h: F32 = (g / (np.float32(1) + np.exp(-g)) * u).astype(np.float32, copy=False)
        return self._matmul(f.down, h, paged)

    def _matmul(self, m: Matrix, x: F32, paged: bool = False) -> F32:
        if self.precision == "fast" and m.layout.quantised:
            return matmul_int8(m.data, m.layout, x)
        values = unpack(m.data, m.layout) if paged else self._values(m)
        product: F32 = values @ x
        return product

    def _values(self, m: Matrix) -> F32:
        if id(m) not in self._dense:
            self._dense[id(m)] = unpack(m.data, m.layout)
        return self._dense[id(m)]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x [..., width] over its root mean square, times weight [width]."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    normed: F32 = (x / np.sqrt(mean + np.float32(eps)) * weight).astype(np.float32, copy=False)
    return normed


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary embedding of heads [h, D], the halves of a head being the two coordinates (Hugging Face's order)."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
