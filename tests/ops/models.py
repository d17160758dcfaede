"""Small random models in every awkward shape, bound to a backend as the engine would, but without an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from colibri_lab.ops.cpu import CpuBackend
from colibri_lab.ops.isa import available
from colibri_lab.ops.layout import PAGE, MatrixLayout, ceil_div, expert_layouts
from colibri_lab.ops.pack import pack_codes, pack_float
from colibri_lab.ops.types import FFN, AttentionWeights, ExpertPages, KVPool, LayerWeights, Matrix, ModelWeights, Rows

LEVELS = available()
FORMATS = (("fp32", 0), ("fp16", 0), *((dtype, group) for dtype in ("int8", "int4") for group in (32, 64, 128)))


@dataclass(frozen=True)
class Shape:
    """What a test varies. window, dense: the layers (by index) that have a sliding window or a dense network."""

    hidden: int = 40
    ffn: int = 24
    experts: int = 4
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 70
    layers: int = 2
    dtype: str = "int4"
    group: int = 32
    kv_dtype: str = "fp16"
    window: int = 0
    recent: int = 0
    sinks: int = 0
    normalise: bool = True
    shared: int = 0
    shared_gate: bool = True
    dense: tuple[int, ...] = ()
    bias: bool = False
    qk_norm: str = ""
    clip: float | None = None
    tied: bool = False
    embedding: str = "fp16"
    positions: int = 48
    seats: int = 3
    capacity: int = 16


class Maker:
    """Random weights of a shape. poison: the byte in padding and in gaps between tiles; it must never show."""

    def __init__(self, shape: Shape, seed: int = 0, poison: int = 0) -> None:
        self.shape, self.poison = shape, poison
        self.rng = np.random.default_rng(seed)

    def vector(self, n: int, around: float = 1.0) -> np.ndarray:
        return (around + 0.1 * self.rng.standard_normal(n)).astype(np.float32)

    def values(self, rows: int, cols: int) -> np.ndarray:
        return (self.rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def fill(self, out: np.ndarray, layout: MatrixLayout) -> None:
        """Random weights into a run; each row of weights has its own size, so that a wrong scale shows."""
        rows, cols = layout.rows, layout.cols
        if layout.quantised:
            low, high = (-127, 128) if layout.dtype == "int8" else (0, 16)
            codes = self.rng.integers(low, high, (rows, cols)).astype(np.int8 if layout.dtype == "int8" else np.uint8)
            scales = (1 + self.rng.random((rows, ceil_div(cols, layout.group)))) / (high * np.sqrt(cols))
            pack_codes(codes, scales.astype(np.float16), layout, out)
        else:
            pack_float(self.values(rows, cols), layout, out)
        if self.poison:
            poison_padding(out, layout, self.poison)

    def matrix(self, rows: int, cols: int) -> Matrix:
        layout = MatrixLayout(rows, cols, self.shape.dtype, self.shape.group)
        data = aligned(layout.pages * PAGE)
        data[:] = self.poison
        self.fill(data, layout)
        return Matrix(layout, data)

    def swiglu(self, width: int) -> FFN:
        hidden = self.shape.hidden
        return FFN(self.matrix(width, hidden), self.matrix(width, hidden), self.matrix(hidden, width))

    def layer(self, index: int) -> LayerWeights:
        s = self.shape
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
        norms = {"": (0, 0), "head": (s.head_dim, s.head_dim), "flat": (queries, keys)}[s.qk_norm]
        attention = AttentionWeights(
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            qkv=self.matrix(queries + 2 * keys, s.hidden),
            o=self.matrix(s.hidden, queries),
            scale=s.head_dim**-0.5,
            window=s.window if index % 2 == 0 else 0,
            qkv_bias=self.vector(queries + 2 * keys, 0) if s.bias else None,
            o_bias=self.vector(s.hidden, 0) if s.bias else None,
            q_norm=self.vector(norms[0]) if s.qk_norm else None,
            k_norm=self.vector(norms[1]) if s.qk_norm else None,
            clip=s.clip,
        )
        both = {"input_norm": self.vector(s.hidden), "post_norm": self.vector(s.hidden), "attention": attention}
        if index in s.dense:
            return LayerWeights(**both, dense=self.swiglu(2 * s.ffn + 1))
        return LayerWeights(
            **both,
            gate=self.values(s.experts, s.hidden) * 3,
            shared=self.swiglu(s.shared) if s.shared else None,
            shared_gate=self.values(1, s.hidden)[0] if s.shared and s.shared_gate else None,
        )

    def weights(self) -> ModelWeights:
        s = self.shape
        angle = np.arange(s.positions)[:, None] * 100.0 ** (-np.arange(s.head_dim // 2) * 2 / s.head_dim)
        head = self.matrix(s.vocab, s.hidden)
        dtype = np.float16 if s.embedding == "fp16" else np.float32
        return ModelWeights(
            hidden=s.hidden,
            vocab=s.vocab,
            norm_eps=1e-5,
            top_k=s.top_k,
            normalise_top_k=s.normalise,
            experts=s.experts,
            layers=tuple(self.layer(i) for i in range(s.layers)),
            expert=expert_layouts(s.hidden, s.ffn, s.dtype, s.group),
            final_norm=self.vector(s.hidden),
            head=head,
            embedding=None if s.tied else self.rng.standard_normal((s.vocab, s.hidden)).astype(dtype),
            cos=np.cos(angle).astype(np.float32),
            sin=np.sin(angle).astype(np.float32),
        )

    def pages(self, weights: ModelWeights, spare: int = 5) -> ExpertPages:
        """Every expert at random frames, some frames unused."""
        s = self.shape
        per_expert = weights.expert[2].pages
        count = s.layers * s.experts * per_expert
        frames = aligned((count + spare) * PAGE).reshape(-1, PAGE)
        frames[:] = 0xFF  # NaN to whoever reads a wrong one
        table = self.rng.permutation(count + spare)[:count].astype(np.int32).reshape(s.layers, s.experts, per_expert)
        for layer in range(s.layers):
            for expert in range(s.experts):
                run = np.full(per_expert * PAGE, self.poison, np.uint8)
                for layout in weights.expert:
                    self.fill(run, layout)
                frames[table[layer, expert]] = run.reshape(-1, PAGE)
        return ExpertPages(frames, table)


class Bound:
    """A model with state of its own, bound to a backend; `step` runs rows through all layers as the engine does."""

    def __init__(
        self, backend, shape: Shape, seed: int = 0, poison: int = 0, model=None, shuffle: int | None = None
    ) -> None:
        maker = Maker(shape, seed, poison)
        self.shape, self.backend = shape, backend
        self.weights, self.pages = model or (w := maker.weights(), maker.pages(w))
        dtype = np.float16 if shape.kv_dtype == "fp16" else np.float32
        tokens = shape.seats * shape.layers * shape.positions
        pool = (tokens + shape.capacity, shape.kv_heads, shape.head_dim)
        where = np.full((shape.seats, shape.layers, shape.positions), -1, np.int32)
        first, seen = np.full(where.shape, -7, np.int16), np.zeros((shape.layers, 4), np.int64)
        self.kv = KVPool(np.full(pool, np.nan, dtype), np.full(pool, np.nan, dtype), where, first, tokens, seen,
                         shape.recent, shape.sinks)  # fmt: skip
        self.rows = Rows.allocate(shape.capacity, shape.hidden, shape.experts, shape.top_k, shape.vocab)
        self.free = list(range(tokens)) if shuffle is None else list(np.random.default_rng(shuffle).permutation(tokens))
        self.next = [0] * shape.seats
        backend.bind(self.weights, self.kv, self.pages, self.rows)

    def step(self, tokens: list[tuple[int, int]], waves: tuple[int, ...] = ()) -> np.ndarray:
        """[(seat, token)] as one step; expert_ffn is cut at the `waves`. Logits [n, V], a copy."""
        rows, backend, n = self.rows, self.backend, len(tokens)
        for r, (seat, token) in enumerate(tokens):
            rows.seat[r], rows.token[r], rows.position[r] = seat, token, self.next[seat]
            self.next[seat] += 1
        backend.embed(n)
        cuts = [0, *waves, self.shape.experts]
        for layer in range(self.shape.layers):
            backend.attn_router(layer, n)
            rows.kv_dst[:n] = [self.free.pop() for _ in range(n)]
            if layer in self.shape.dense:
                backend.expert_ffn(layer, n, 0, 0)
            else:
                for first, last in pairwise(cuts):
                    backend.expert_ffn(layer, n, first, last)
        rows.out_row[:n] = np.arange(n)
        backend.head(n)
        return rows.logits[:n].copy()

    def run(self, tokens: list[int], seat: int = 0, chunk: int = 1, **how) -> np.ndarray:
        """One sequence, `chunk` tokens a step. Logits [T, V]."""
        parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return np.concatenate([self.step([(seat, t) for t in part], **how) for part in parts])


def cpu(level: str = LEVELS[0], precision: str = "exact", threads: int = 1) -> CpuBackend:
    return CpuBackend(precision, threads, level)


def make(shape: Shape, seed: int = 0, poison: int = 0):
    maker = Maker(shape, seed, poison)
    weights = maker.weights()
    return weights, maker.pages(weights)


def aligned(size: int) -> np.ndarray:
    block = np.zeros(size + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size]


def poison_padding(out: np.ndarray, layout: MatrixLayout, byte: int) -> None:
    """Overwrite every weight, code and scale of a run that belongs to no row or input with `byte`."""
    across, cols = layout.tiles_per_row_group, layout.tile_cols
    for tile in range(layout.tiles):
        group, i = divmod(tile, across)
        rows, inputs = min(16, layout.rows - 16 * group), min(cols, layout.cols - i * cols)
        at = layout.tile_offset(tile)
        view = out[at : at + layout.tile_bytes]
        if not layout.quantised:
            values = view.view(np.uint32 if layout.dtype == "fp32" else np.uint16).reshape(cols, 16)
            values[inputs:] = values[:, rows:] = byte * 0x01010101 & (0xFFFFFFFF if layout.dtype == "fp32" else 0xFFFF)
            continue
        split = layout.groups_per_tile * 32
        scales = view[:split].view(np.uint16).reshape(-1, 16)
        scales[ceil_div(inputs, layout.group) :] = scales[:, rows:] = byte * 0x0101
        if layout.dtype == "int8":
            codes = view[split:].reshape(-1, 16, 4).transpose(0, 2, 1).reshape(cols, 16)
            codes[inputs:] = codes[:, rows:] = byte
            view[split:] = codes.reshape(-1, 4, 16).transpose(0, 2, 1).reshape(-1)
        else:
            words = view[split:].reshape(-1, 16, 4).transpose(0, 2, 1)  # [T / 8, 4, 16]
            codes = np.concatenate([words & 15, words >> 4], axis=1).reshape(cols, 16)
            codes[inputs:] = codes[:, rows:] = byte & 15
            halves = codes.reshape(-1, 2, 4, 16)
            view[split:] = (halves[:, 0] | halves[:, 1] << 4).transpose(0, 2, 1).reshape(-1)


def with_format(shape: Shape, dtype: str, group: int) -> Shape:
    return replace(shape, dtype=dtype, group=group)
