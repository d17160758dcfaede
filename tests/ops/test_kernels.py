"""Every kernel, at every ISA level of this machine, against the oracle on awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.ops.reference import ReferenceBackend

from .models import FORMATS, LEVELS, Bound, Shape, cpu, make, with_format

STEPS = [  # rows of several seats, each seat's rows in order of position
    [(0, 3)],
    [(0, 9), (1, 4), (0, 69), (2, 0), (1, 1), (0, 5), (2, 7), (2, 8), (0, 1)],
    [(1, 2), (1, 3), (0, 4)],
    [(2, 6)],
]


def limit_of(shape: Shape, precision: str) -> float:
    """Of the largest logit. Where something is rounded to fp16 or int8, a value near a half may go either way."""
    if precision == "fast" and shape.dtype in ("int4", "int8"):
        return 2e-2
    return 2e-4 if shape.kv_dtype == "fp16" else 5e-6


def same(got: Bound, want: Bound, precision: str) -> None:
    limit = limit_of(got.shape, precision)
    for step in STEPS:
        a, b = got.step(step), want.step(step)
        n = len(step)
        assert np.abs(a - b).max() <= limit * np.abs(b).max()
        assert np.allclose(got.rows.logsumexp[:n], want.rows.logsumexp[:n], rtol=limit, atol=limit)
        assert np.array_equal(got.rows.argmax[:n], a.argmax(1))
        assert np.array_equal(got.rows.experts[:n], want.rows.experts[:n])
        assert np.allclose(got.rows.weights[:n], want.rows.weights[:n], rtol=limit * 20, atol=limit)
        assert np.abs(got.rows.ffn_in[:n] - want.rows.ffn_in[:n]).max() <= 20 * limit
        assert np.array_equal(got.kv.where, want.kv.where)
        written = want.kv.where[want.kv.where >= 0]
        for g, w in ((got.kv.k, want.kv.k), (got.kv.v, want.kv.v)):
            assert np.abs(g[written].astype(np.float32) - w[written].astype(np.float32)).max() <= 1e-2


def compare(shape: Shape, level: str, precision: str, seed: int = 0, threads: int = 1) -> None:
    model = make(shape, seed)
    backend = cpu(level, precision, threads)
    try:
        same(Bound(backend, shape, model=model), Bound(ReferenceBackend(precision), shape, model=model), precision)
    finally:
        backend.close()


SHAPES = {
    "small": Shape(),
    "odd": Shape(hidden=50, ffn=25, experts=3, top_k=1, heads=3, kv_heads=1, head_dim=6, vocab=75),
    "wide": Shape(hidden=290, ffn=310, experts=7, top_k=3, heads=6, kv_heads=2, head_dim=80, vocab=530, layers=1),
    "many": Shape(hidden=64, ffn=40, experts=60, top_k=4, heads=5, kv_heads=5, head_dim=16, normalise=False),
    "one": Shape(experts=1, top_k=1, heads=8, kv_heads=1, head_dim=8, positions=20, tied=True, embedding="fp32"),
    "extras": Shape(layers=3, dense=(1,), shared=50, bias=True, qk_norm="head", clip=0.6, kv_dtype="fp32"),
    "flat": Shape(qk_norm="flat", shared=17, shared_gate=False, tied=True, heads=7, kv_heads=7, head_dim=10, top_k=4),
}


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, level, precision):
    compare(SHAPES[name], level, precision, seed=1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_formats(dtype, group, level):
    shape = with_format(Shape(hidden=100, ffn=140, shared=36, layers=1, tied=True), dtype, group)
    for precision in ("exact", "fast"):
        compare(shape, level, precision, seed=2)


@pytest.mark.parametrize("window", [4, 5, 6, 1])
@pytest.mark.parametrize("level", LEVELS)
def test_window_borders(window, level):
    """A prompt of five tokens, and one more, under windows one smaller, equal and one larger."""
    shape = Shape(window=window, layers=1, dtype="fp32", group=0, kv_dtype="fp32")
    model = make(shape, 5)
    got = Bound(cpu(level), shape, model=model).run([3, 9, 4, 6, 1, 2], chunk=5)
    want = Bound(ReferenceBackend(), shape, model=model).run([3, 9, 4, 6, 1, 2], chunk=5)
    assert np.abs(got - want).max() <= 5e-6 * np.abs(want).max()
    full = Bound(cpu(level), replace(shape, window=0), model=make(replace(shape, window=0), 5)).run([3, 9, 4, 6, 1, 2])
    assert [np.array_equal(a, b) for a, b in zip(got, full, strict=True)] == [p < window for p in range(6)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    draw = data.draw
    kv_heads, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dtype, group = draw(st.sampled_from(FORMATS))
    shape = Shape(
        hidden=draw(st.integers(1, 140)),
        ffn=draw(st.integers(1, 140)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 20)),
        vocab=draw(st.integers(70, 150)),
        layers=draw(st.integers(1, 2)),
        dtype=dtype,
        group=group,
        window=draw(st.integers(0, 5)),
        shared=draw(st.sampled_from([0, 0, 5, 40])),
        tied=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["", "head", "flat"])),
        normalise=draw(st.booleans()),
        kv_dtype=draw(st.sampled_from(["fp32", "fp16"])),
    )
    limit = 1e-4 if shape.kv_dtype == "fp32" else 5e-3  # a key near a half of fp16 may go either way
    model = make(shape, draw(st.integers(0, 1000)))
    level, threads = draw(st.sampled_from(LEVELS)), draw(st.sampled_from([1, 2]))
    backend = cpu(level, "exact", threads)
    got, want = Bound(backend, shape, model=model), Bound(ReferenceBackend("exact"), shape, model=model)
    for step in STEPS:
        a, b = got.step(step), want.step(step)
        rms = np.sqrt((want.rows.x[: len(step)] ** 2).mean(axis=1)).min()  # the norm of a small x enlarges its rounding
        assert np.abs(a - b).max() <= limit * max(np.abs(b).max(), 1) * max(1, 0.05 / rms)
    backend.close()
