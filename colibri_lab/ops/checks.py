"""What every backend refuses before it computes: wrong shapes, dtypes, strides, indices. Each error names the array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layout import PAGE
from .routing import COUNTS, MOST_EXPERTS
from .types import FFN, I32, SEEN, AttentionWeights, ExpertPages, KVPool, LayerWeights, Matrix, ModelWeights, Rows

Shape = tuple[int, ...]
F32, F16, INT = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32)


def precision(name: str) -> str:
    """`name` if it is fast or exact, else ValueError."""
    if name not in ("fast", "exact"):
        raise ValueError(f"precision {name!r} is neither fast nor exact")
    return name


def array(a: NDArray[Any] | None, name: str, shape: Shape, *dtypes: np.dtype[Any], writeable: bool = False) -> None:
    """ValueError unless `a` is a contiguous array of this shape (-1: any length) and one of these dtypes."""
    if not isinstance(a, np.ndarray):
        raise ValueError(f"{name} must be an array, not {type(a).__name__}")
    if a.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, not {a.dtype}")
    if a.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, a.shape, strict=True)):
        raise ValueError(f"{name} must have shape {shape}, not {a.shape}")
    if not a.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous")
    if writeable and not a.flags.writeable:
        raise ValueError(f"{name} must be writeable")


def matrix(m: Matrix, name: str, rows: int, cols: int) -> None:
    if (m.layout.rows, m.layout.cols) != (rows, cols):
        raise ValueError(f"{name} must be {rows} x {cols}, not {m.layout.rows} x {m.layout.cols}")
    if m.data.dtype != np.uint8 or not m.data.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous uint8")
    if m.data.size < m.layout.end:
        raise ValueError(f"{name} has {m.data.size} bytes, its layout needs {m.layout.end}")


def bind(w: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
    """Everything that a backend is bound to. ValueError names the first array that does not fit."""
    hidden, half = w.hidden, w.cos.shape[-1]
    array(w.final_norm, "final_norm", (hidden,), F32)
    array(w.cos, "cos", (-1, half), F32)
    array(w.sin, "sin", w.cos.shape, F32)
    matrix(w.head, "head", w.vocab, hidden)
    if w.embedding is not None:
        array(w.embedding, "embedding", (w.vocab, hidden), F16, F32)
    sparse = [layer for layer in w.layers if layer.dense is None]
    if sparse and not 1 <= w.top_k <= w.experts:
        raise ValueError(f"top_k {w.top_k} is not between 1 and the {w.experts} experts")
    if sparse and w.experts > MOST_EXPERTS:
        raise ValueError(f"a layer has at most {MOST_EXPERTS} experts, not {w.experts}")
    if w.routing is not None:
        array(w.routing.counts, "routing.counts", (len(w.layers), len(COUNTS)), np.dtype(np.int64), writeable=True)
        array(w.routing.span, "routing.span", (len(w.layers), 2), F32, writeable=True)
    for i, layer in enumerate(w.layers):
        _layer(layer, w, f"layer {i}")
    if sparse:
        gate, up, down = w.expert
        if (gate.cols, up.rows, up.cols, down.rows, down.cols) != (hidden, gate.rows, hidden, hidden, gate.rows):
            raise ValueError("expert layouts must be gate [F, H], up [F, H], down [H, F]")
        _alike(gate, up, "expert gate and up")
        array(pages.table, "page table", (len(w.layers), w.experts, -1), INT)
        if pages.table.shape[2] < down.pages:
            raise ValueError(f"page table has {pages.table.shape[2]} pages an expert, the layout needs {down.pages}")
        array(pages.frames, "frames", (-1, PAGE), np.dtype(np.uint8))
        array(pages.waited, "waited", (1,), np.dtype(np.int64), writeable=True)
    _kv(kv, w, rows)
    _rows(rows, w)


def _layer(layer: LayerWeights, w: ModelWeights, name: str) -> None:
    array(layer.input_norm, f"{name} input_norm", (w.hidden,), F32)
    array(layer.post_norm, f"{name} post_norm", (w.hidden,), F32)
    _attention(layer.attention, w, name)
    if (layer.gate is None) == (layer.dense is None):
        raise ValueError(f"{name} must have either a router gate or a dense network")
    if layer.gate is not None:
        array(layer.gate, f"{name} router gate", (w.experts, w.hidden), F32)
    for ffn, what in ((layer.dense, "dense"), (layer.shared, "shared")):
        if ffn is not None:
            _ffn(ffn, w.hidden, f"{name} {what}")
    if layer.shared_gate is not None:
        array(layer.shared_gate, f"{name} shared_gate", (w.hidden,), F32)


def _attention(a: AttentionWeights, w: ModelWeights, name: str) -> None:
    if a.kv_heads < 1 or a.heads % a.kv_heads:
        raise ValueError(f"{name}: {a.heads} query heads cannot share {a.kv_heads} key heads")
    if a.head_dim != 2 * w.cos.shape[1]:
        raise ValueError(f"{name}: head_dim {a.head_dim} does not fit rotary tables of {w.cos.shape[1]} columns")
    width = (a.heads + 2 * a.kv_heads) * a.head_dim
    matrix(a.qkv, f"{name} qkv", width, w.hidden)
    matrix(a.o, f"{name} o", w.hidden, a.heads * a.head_dim)
    if a.qkv_bias is not None:
        array(a.qkv_bias, f"{name} qkv_bias", (width,), F32)
    if a.o_bias is not None:
        array(a.o_bias, f"{name} o_bias", (w.hidden,), F32)
    if (a.q_norm is None) != (a.k_norm is None):
        raise ValueError(f"{name}: q_norm and k_norm come together")
    for norm, heads, what in ((a.q_norm, a.heads, "q_norm"), (a.k_norm, a.kv_heads, "k_norm")):
        if norm is not None and len(norm) not in (a.head_dim, heads * a.head_dim):
            raise ValueError(f"{name} {what} of {len(norm)} is neither per head nor flat")
        if norm is not None:
            array(norm, f"{name} {what}", (-1,), F32)


def _ffn(f: FFN, hidden: int, name: str) -> None:
    width = f.gate.layout.rows
    matrix(f.gate, f"{name} gate", width, hidden)
    matrix(f.up, f"{name} up", width, hidden)
    matrix(f.down, f"{name} down", hidden, width)
    _alike(f.gate.layout, f.up.layout, f"{name} gate and up")


def _alike(a: Any, b: Any, name: str) -> None:
    if (a.dtype, a.group) != (b.dtype, b.group):
        raise ValueError(f"{name} must have the same dtype and group")


def _kv(kv: KVPool, w: ModelWeights, rows: Rows) -> None:
    heads, dim = w.layers[0].attention.kv_heads, w.layers[0].attention.head_dim
    if any((layer.attention.kv_heads, layer.attention.head_dim) != (heads, dim) for layer in w.layers):
        raise ValueError("all layers must have the same key heads and head_dim: they share one pool")
    array(kv.k, "kv.k", (-1, heads, dim), F16, F32, writeable=True)
    array(kv.v, "kv.v", kv.k.shape, kv.k.dtype, writeable=True)
    array(kv.where, "kv.where", (-1, len(w.layers), -1), INT, writeable=True)
    array(kv.first, "kv.first", kv.where.shape, np.dtype(np.int16), writeable=True)
    array(kv.seen, "kv.seen", (len(w.layers), len(SEEN)), np.dtype(np.int64), writeable=True)
    if kv.recent < 0 or kv.sinks < 0:
        raise ValueError(f"kv.recent {kv.recent} and kv.sinks {kv.sinks} must be at least 0")
    if kv.staging < 0 or kv.staging + rows.capacity > len(kv.k):
        raise ValueError(f"staging at {kv.staging} leaves no room for {rows.capacity} rows in {len(kv.k)} tokens")


def _rows(rows: Rows, w: ModelWeights) -> None:
    r, e, k = rows.capacity, max(w.experts, 1), max(w.top_k, 1)
    for name in ("token", "position", "seat", "kv_dst", "out_row", "argmax"):
        array(getattr(rows, name), f"rows.{name}", (r,), INT, writeable=True)
    for name, shape in (
        ("x", (r, w.hidden)),
        ("ffn_in", (r, w.hidden)),
        ("router_logits", (r, e)),
        ("weights", (r, k)),
    ):
        array(getattr(rows, name), f"rows.{name}", shape, F32, writeable=True)
    array(rows.experts, "rows.experts", (r, k), INT, writeable=True)
    array(rows.logits, "rows.logits", (r, w.vocab), F32, writeable=True)
    array(rows.logsumexp, "rows.logsumexp", (r,), F32, writeable=True)
    array(rows.spent, "rows.spent", (2,), np.dtype(np.int64), writeable=True)


def indices(values: I32, limit: int, name: str) -> I32:
    """`values` if all lie in 0 <= v < limit, else IndexError."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise IndexError(f"{name} holds an index outside 0..{limit - 1}")
    return values


def positions(rows: Rows, kv: KVPool, w: ModelWeights, at: int, n: int) -> None:
    """IndexError when one of the n rows from `at` on is none of the step's, or its seat or position lies outside the
    page table or the rotary tables."""
    if at < 0 or n < 0 or at + n > rows.capacity:
        raise IndexError(f"rows {at} to {at + n} are outside the {rows.capacity} of a step")
    indices(rows.seat[at : at + n], kv.where.shape[0], "seat")
    indices(rows.position[at : at + n], min(kv.where.shape[2], w.cos.shape[0]), "position")
