"""The oracle against formulas written another way: whole matrices, complex numbers, published figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from colibri_lab.ops import route
from colibri_lab.ops.int8 import matmul_int8, quantise_row
from colibri_lab.ops.pack import unpack
from colibri_lab.ops.reference import ReferenceBackend, rotate
from colibri_lab.ops.types import Matrix

from .models import FORMATS, Bound, Shape, make, with_format

TOKENS = [3, 9, 4, 69, 0, 1, 5, 33, 8]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def whole_sequence(shape: Shape, weights, pages, tokens: list[int]) -> np.ndarray:
    """The model as a textbook has it: float64, whole sequence at once, a mask, experts over all tokens."""
    w, t = weights, len(tokens)
    dense = lambda m: unpack(m.data, m.layout).astype(np.float64)  # noqa: E731
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + w.norm_eps) * g  # noqa: E731

    def swiglu(f, x):
        g, u = x @ dense(f[0]).T, x @ dense(f[1]).T
        return (g / (1 + np.exp(-g)) * u) @ dense(f[2]).T

    table = dense(w.head) if w.embedding is None else w.embedding.astype(np.float64)
    x = table[tokens]
    turn = (w.cos[:t] + 1j * w.sin[:t])[:, None]  # [T, 1, D/2]
    for i, layer in enumerate(w.layers):
        a = layer.attention
        qkv = norm(x, layer.input_norm) @ dense(a.qkv).T + (0 if a.qkv_bias is None else a.qkv_bias)
        q, k, v = np.split(qkv, [a.heads * a.head_dim, (a.heads + a.kv_heads) * a.head_dim], axis=1)
        if a.q_norm is not None:
            q = norm(q.reshape(t, -1, len(a.q_norm)), a.q_norm).reshape(t, -1)
            k = norm(k.reshape(t, -1, len(a.k_norm)), a.k_norm).reshape(t, -1)
        if a.clip is not None:
            q, k, v = (np.clip(m, -a.clip, a.clip) for m in (q, k, v))
        q, k, v = (m.reshape(t, -1, a.head_dim) for m in (q, k, v))
        half = a.head_dim // 2
        q, k = ((m[..., :half] + 1j * m[..., half:]) * turn for m in (q, k))
        q, k = (np.concatenate([m.real, m.imag], -1) for m in (q, k))
        k, v = (np.repeat(m, a.heads // a.kv_heads, axis=1) for m in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * a.scale
        ago = np.arange(t)[:, None] - np.arange(t)
        scores[:, (ago < 0) | (ago >= (a.window or t))] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(t, -1)
        x = x + mixed @ dense(a.o).T + (0 if a.o_bias is None else a.o_bias)
        y = norm(x, layer.post_norm)
        if layer.dense is not None:
            x = x + swiglu((layer.dense.gate, layer.dense.up, layer.dense.down), y)
            continue
        p = softmax(y @ layer.gate.T.astype(np.float64))
        keep = np.argsort(-p, axis=1, kind="stable")[:, : w.top_k]
        chosen = np.zeros_like(p)
        np.put_along_axis(chosen, keep, np.take_along_axis(p, keep, 1), 1)
        if w.normalise_top_k:
            chosen /= chosen.sum(1, keepdims=True)
        for e in range(w.experts):
            run = pages.frames[pages.table[i, e]].reshape(-1)
            x = x + chosen[:, e : e + 1] * swiglu([Matrix(layout, run) for layout in w.expert], y)
        if layer.shared is not None:
            s = layer.shared
            weight = 1 if layer.shared_gate is None else 1 / (1 + np.exp(-(y @ layer.shared_gate)))[:, None]
            x = x + weight * swiglu((s.gate, s.up, s.down), y)
    return norm(x, w.final_norm) @ dense(w.head).T


VARIANTS = [
    Shape(),
    Shape(bias=True, qk_norm="head", normalise=False, shared=20, window=4, layers=3, dense=(1,)),
    Shape(qk_norm="flat", clip=0.5, tied=True, experts=7, top_k=1, heads=6, kv_heads=1, head_dim=10),
    Shape(shared=33, shared_gate=False, experts=1, top_k=1, heads=2, kv_heads=2, embedding="fp32"),
]


@pytest.mark.parametrize("shape", VARIANTS)
@pytest.mark.parametrize(("dtype", "group"), [("fp32", 0), ("int4", 32), ("int8", 64)])
def test_exact_equals_the_textbook(shape, dtype, group):
    shape = replace(with_format(shape, dtype, group), kv_dtype="fp32")
    weights, pages = make(shape, seed=3)
    got = Bound(ReferenceBackend("exact"), shape, model=(weights, pages)).run(TOKENS, chunk=4)
    want = whole_sequence(shape, weights, pages, TOKENS)
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_fast_stays_near_exact(dtype, group):
    shape = with_format(Shape(hidden=96, ffn=80), dtype, group)
    model = make(shape, seed=4)
    exact = Bound(ReferenceBackend("exact"), shape, model=model).run(TOKENS)
    fast = Bound(ReferenceBackend("fast"), shape, model=model).run(TOKENS)
    assert np.abs(fast - exact).max() <= 0.05 * np.abs(exact).max()
    assert np.array_equal(fast, exact) == (dtype in ("fp32", "fp16"))


def test_int8_activations_are_exact_for_whole_numbers():
    shape = Shape(dtype="int8", group=32)
    matrix = make(shape)[0].head
    x = np.zeros(shape.hidden, np.float32)
    x[[0, 5, 39]] = 127, -3, 127  # both groups have scale 1
    want = unpack(matrix.data, matrix.layout).astype(np.float64) @ x
    assert np.allclose(matmul_int8(matrix.data, matrix.layout, x), want, rtol=1e-5)


def test_quantiser_edges():
    codes, scales = quantise_row(np.array([0.5, -1.0, 1.5, 127.0], np.float32), 32)
    assert codes[0, :4].tolist() == [0, -1, 2, 127] and scales[0] == 1  # halves to even
    assert quantise_row(np.zeros(3, np.float32), 32)[1].tolist() == [0.0]
    assert quantise_row(np.full(3, 1e-38, np.float32), 32)[1].tolist() == [0.0]
    assert np.isnan(quantise_row(np.array([1, np.nan, 2], np.float32), 32)[1]).all()
    assert np.isnan(quantise_row(np.array([1, np.inf, 2], np.float32), 32)[1]).all()


def test_router_figures():
    logits = np.array([2, 1, 0, -1], np.float32)
    assert np.allclose(route.softmax(logits, 2, False).weights, [0.643914, 0.236883], atol=1e-6)
    assert np.allclose(route.softmax(logits, 2, True).weights, [0.731059, 0.268941], atol=1e-6)
    assert route.softmax(logits, 1, True).weights.tolist() == [1.0]
    assert route.softmax(np.zeros(8, np.float32), 2, True).experts.tolist() == [0, 1]
    assert route.softmax(np.array([1.0, 1.002, 0, 1.001], np.float32), 2, True).experts.tolist() == [1, 3]


def test_rotation_keeps_lengths_and_angles():
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    turned = rotate(x, np.cos(np.full(4, 0.3, np.float32)), np.sin(np.full(4, 0.3, np.float32)))
    assert np.allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(x, axis=1))
    assert np.allclose(turned[:, 0], x[:, 0] * np.cos(0.3) - x[:, 4] * np.sin(0.3), atol=1e-6)
