"""The ctypes twins of kernels/cpu/types.h, filled from the plain arrays of a bound model."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import types as t
from .layout import DTYPES, MatrixLayout, ceil_div
from .routing import KINDS, Routing, code_block, gate_codes, sigmoid_table, threshold_guess
from .runs import Runs


class Matrix(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("start", c.c_int64),
        *((name, c.c_int32) for name in ("rows", "cols", "dtype", "group", "groups", "tile_cols", "tile_bytes")),
        *((name, c.c_int32) for name in ("groups_per_tile", "tiles_across", "tiles_per_page")),
    ]


class Ffn(c.Structure):
    _fields_ = [("gate", Matrix), ("up", Matrix), ("down", Matrix)]


class Layer(c.Structure):
    _fields_ = [
        *(
            (name, c.c_void_p)
            for name in ("input_norm", "post_norm", "qkv_bias", "o_bias", "q_norm", "k_norm", "gate", "shared_gate")
        ),
        ("qkv", Matrix),
        ("o", Matrix),
        ("dense", Ffn),
        ("shared", Ffn),
        *(
            (name, c.c_int32)
            for name in ("heads", "window", "q_norm_len", "k_norm_len", "has_dense", "has_shared", "has_clip")
        ),
        ("scale", c.c_float),
        ("clip", c.c_float),
        ("gate_codes", c.c_void_p),
        ("gate_facts", c.c_void_p),
    ]


_SIZES = ("n_layers", "hidden", "vocab", "experts", "top_k", "normalise", "embedding_dtype", "rope_positions", "exact")


class Model(c.Structure):
    _fields_ = [
        *((name, c.c_void_p) for name in ("layers", "final_norm", "cos", "sin", "embedding")),
        ("head", Matrix),
        ("expert", Ffn),
        *((name, c.c_int32) for name in (*_SIZES, "threads")),
        ("eps", c.c_float),
        *((name, c.c_void_p) for name in ("k", "v", "where", "first", "seen")),
        *((name, c.c_int64) for name in ("tokens", "staging")),
        *((name, c.c_int32) for name in ("kv_dtype", "kv_heads", "head_dim", "seats", "positions", "recent", "sinks")),
        *((name, c.c_void_p) for name in ("frames", "table", "waited", "reader")),
        ("n_frames", c.c_int64),
        *((name, c.c_int32) for name in ("table_pages", "expert_pages", "capacity")),
        *(
            (name, c.c_void_p)
            for name in (
                *("token", "position", "seat", "kv_dst", "out_row"),
                *(
                    "x",
                    "ffn_in",
                    "router_logits",
                    "weights",
                    "logits",
                    "logsumexp",
                    "experts_of_row",
                    "argmax",
                    "spent",
                ),
            )
        ),
        *((name, c.c_void_p) for name in ("run_experts", "run_weights", "run_kv_dst", "reached", "run_spent")),
        *((name, c.c_int32) for name in ("router", "router_bits", "router_audit", "code_width", "code_block")),
        *((name, c.c_float) for name in ("threshold_at", "threshold_step")),
        ("sigmoid", c.c_void_p),
        ("sigmoid_from", c.c_int64),
        ("router_counts", c.c_void_p),
        ("router_span", c.c_void_p),
    ]


STRUCTS = (Matrix, Ffn, Layer, Model)  # in the order of colibri_sizeof


def model(w: t.ModelWeights, kv: t.KVPool, pages: t.ExpertPages, rows: t.Rows, runs: Runs, exact: bool,
          threads: int) -> Model:  # fmt: skip
    """Everything a backend is bound to, as one struct of addresses; the caller keeps the arrays alive."""
    layers = (Layer * len(w.layers))(*[_layer(layer) for layer in w.layers])
    routing = w.routing or Routing.make(len(w.layers))
    keep: list[Any] = [layers, routing]
    m = Model(
        layers=c.addressof(layers),
        final_norm=_at(w.final_norm),
        cos=_at(w.cos),
        sin=_at(w.sin),
        embedding=_at(w.embedding),
    )
    m.keep = keep  # for as long as the library is bound
    bind_routing(m, layers, [layer.gate for layer in w.layers], routing, w.experts, w.top_k, keep)
    m.head = _matrix(w.head.layout, w.head.data)
    if any(layer.gate is not None for layer in w.layers):
        m.expert = Ffn(*[_matrix(layout, None) for layout in w.expert])
        m.frames, m.n_frames = _at(pages.frames), len(pages.frames)
        m.table, m.table_pages, m.expert_pages = _at(pages.table), pages.table.shape[2], w.expert[2].pages
        m.waited, m.reader = _at(pages.waited), pages.reader
    m.n_layers, m.hidden, m.vocab, m.experts, m.top_k = len(w.layers), w.hidden, w.vocab, w.experts, w.top_k
    m.normalise, m.rope_positions, m.exact, m.threads = w.normalise_top_k, w.cos.shape[0], exact, threads
    m.embedding_dtype = 0 if w.embedding is None else _dtype(w.embedding)
    m.eps = w.norm_eps
    m.k, m.v, m.where, m.first = _at(kv.k), _at(kv.v), _at(kv.where), _at(kv.first)
    m.seen, m.recent, m.sinks = _at(kv.seen), kv.recent, kv.sinks
    m.tokens, m.staging = len(kv.k), kv.staging
    m.kv_dtype, m.kv_heads, m.head_dim = _dtype(kv.k), kv.k.shape[1], kv.k.shape[2]
    m.seats, _, m.positions = kv.where.shape
    m.capacity = rows.capacity
    for name in ("token", "position", "seat", "kv_dst", "out_row", "x", "ffn_in", "router_logits", "weights", "logits"):
        setattr(m, name, _at(getattr(rows, name)))
    m.logsumexp, m.experts_of_row, m.argmax = _at(rows.logsumexp), _at(rows.experts), _at(rows.argmax)
    m.spent = _at(rows.spent)
    m.run_experts, m.run_weights, m.run_kv_dst = _at(runs.experts), _at(runs.weights), _at(runs.kv_dst)
    m.reached, m.run_spent = _at(runs.reached), _at(runs.spent)
    return m


def bind_routing(
    m: Model,
    layers: c.Array[Layer],
    gates: Sequence[t.F32 | None],
    routing: Routing,
    experts: int,
    k: int,
    keep: list[Any],
) -> None:
    """The router's fields of a model and its layers; what they point to is added to `keep`."""
    m.router, m.router_bits, m.router_audit = KINDS.index(routing.kind), routing.bits, routing.audit
    m.router_counts, m.router_span = _at(routing.counts), _at(routing.span)
    if routing.kind == "bit_level" and experts:
        m.sigmoid, m.sigmoid_from = _at(sigmoid_table()), int((sigmoid_table() == 0).sum())
        m.threshold_at, m.threshold_step = threshold_guess(experts, k)
    if routing.kind == "two_stage":
        m.code_block = code_block(routing.bits)
        for layer, gate in zip(layers, gates, strict=True):
            if gate is not None:
                codes = gate_codes(gate, routing.bits)
                m.code_width = codes.codes.shape[1]
                layer.gate_codes, layer.gate_facts = _at(codes.codes), _at(codes.facts)
                keep.append(codes)


def _layer(layer: t.LayerWeights) -> Layer:
    a = layer.attention
    out = Layer(input_norm=_at(layer.input_norm), post_norm=_at(layer.post_norm), gate=_at(layer.gate))
    out.qkv_bias, out.o_bias, out.shared_gate = _at(a.qkv_bias), _at(a.o_bias), _at(layer.shared_gate)
    out.qkv, out.o = _matrix(a.qkv.layout, a.qkv.data), _matrix(a.o.layout, a.o.data)
    out.heads, out.window, out.scale = a.heads, a.window, a.scale
    if a.q_norm is not None and a.k_norm is not None:
        out.q_norm, out.q_norm_len = _at(a.q_norm), len(a.q_norm)
        out.k_norm, out.k_norm_len = _at(a.k_norm), len(a.k_norm)
    if a.clip is not None:
        out.has_clip, out.clip = 1, a.clip
    if layer.dense is not None:
        out.has_dense, out.dense = 1, _ffn(layer.dense)
    if layer.shared is not None:
        out.has_shared, out.shared = 1, _ffn(layer.shared)
    return out


def _ffn(f: t.FFN) -> Ffn:
    return Ffn(*[_matrix(m.layout, m.data) for m in (f.gate, f.up, f.down)])


def _matrix(m: MatrixLayout, data: t.U8 | None) -> Matrix:
    group = m.group if m.quantised else 0
    return Matrix(
        data=_at(data),
        start=m.start,
        rows=m.rows,
        cols=m.cols,
        dtype=DTYPES.index(m.dtype),
        group=group,
        groups=ceil_div(m.cols, group) if group else 0,
        tile_cols=m.tile_cols,
        tile_bytes=m.tile_bytes,
        groups_per_tile=m.groups_per_tile,
        tiles_across=m.tiles_per_row_group,
        tiles_per_page=m.tiles_per_page,
    )


def _at(a: np.ndarray[Any, Any] | None) -> int | None:
    return None if a is None else a.ctypes.data


def _dtype(a: np.ndarray[Any, Any]) -> int:
    return DTYPES.index("fp16" if a.dtype == np.float16 else "fp32")
