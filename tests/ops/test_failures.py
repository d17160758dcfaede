"""Wrong input gives an error that names it: never a crash, never a wrong address."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from colibri_lab.ops.layout import MatrixLayout
from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.types import ExpertPages, Matrix, MissingPage, NonFiniteLogits, Rows

from .models import LEVELS, Bound, Shape, cpu, make

SHAPE = Shape(hidden=64, ffn=64, experts=4, top_k=2)
BACKENDS = [*LEVELS, "reference"]


def backend(name: str, precision: str = "exact"):
    return ReferenceBackend(precision) if name == "reference" else cpu(name, precision)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_name_layer_and_row(name, precision, bad):
    bound = Bound(backend(name, precision), SHAPE)
    bound.rows.seat[:3], bound.rows.token[:3], bound.rows.position[:3] = [0, 1, 2], [3, 4, 5], 0
    bound.backend.embed(3)
    bound.rows.x[1, 7] = bad
    with np.errstate(all="ignore"), pytest.raises(NonFiniteLogits) as caught:
        bound.backend.attn_router(1, 3)
    assert (caught.value.layer, caught.value.row) == (1, 1)


@pytest.mark.parametrize("name", BACKENDS)
def test_minus_infinity_is_a_logit(name):
    """A gate row that overflows to -inf bars its expert and no other."""
    weights, pages = make(SHAPE)
    gate = np.zeros_like(weights.layers[0].gate)
    gate[1], gate[2] = -3e38, 0.1
    layers = (replace(weights.layers[0], gate=gate, post_norm=np.ones(64, np.float32)), weights.layers[1])
    bound = Bound(backend(name), SHAPE, model=(replace(weights, layers=layers), pages))
    bound.backend.embed(1)
    bound.rows.x[0] = np.linspace(1, 2, 64)
    with np.errstate(all="ignore"):
        bound.backend.attn_router(0, 1)
    assert bound.rows.router_logits[0, 1] == -np.inf
    assert 1 not in bound.rows.experts[0] and np.isfinite(bound.rows.weights[0]).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("frame", [-1, 10_000])
def test_missing_page(name, frame):
    bound = Bound(backend(name), SHAPE)
    bound.backend.embed(1)
    bound.backend.attn_router(0, 1)
    before = bound.rows.x.copy()
    expert = int(bound.rows.experts[0, 1])
    saved = bound.pages.table.copy()
    bound.pages.table[0, expert, -1] = frame
    with pytest.raises(MissingPage, match=f"layer 0 expert {expert} "):
        bound.backend.expert_ffn(0, 1, 0, 4)
    assert np.array_equal(bound.rows.x, before) and (bound.kv.where[0, 0, 0] == bound.kv.staging)
    bound.pages.table[:] = -1  # only the experts that the rows use need be there, and only in their wave
    bound.pages.table[0, bound.rows.experts[0]] = saved[0, bound.rows.experts[0]]
    bound.backend.expert_ffn(0, 1, 0, 4)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("array", "value"),
    [("token", 70), ("token", -1), ("seat", 3), ("position", 48), ("position", -1), ("kv_dst", 99999), ("experts", 4)],
)
def test_indices_are_checked(name, array, value):
    bound = Bound(backend(name), SHAPE)
    target = getattr(bound.rows, array)

    def run(routed_to: int | None = None) -> None:
        bound.backend.embed(2)
        bound.backend.attn_router(0, 2)
        if routed_to is not None:
            bound.rows.experts[1, 1] = routed_to
        bound.backend.expert_ffn(0, 2, 0, 4)

    bound.rows.position[1] = 1
    run()
    target[1] = value
    with pytest.raises(IndexError, match=array):
        run(value if array == "experts" else None)


@pytest.mark.parametrize("name", BACKENDS)
def test_hole_in_the_history(name):
    bound = Bound(backend(name), SHAPE)
    bound.step([(0, 3)])
    bound.kv.where[0, 1, 0] = -1
    with pytest.raises(IndexError, match="where"):
        bound.step([(0, 4)])


@pytest.mark.parametrize("level", LEVELS)
def test_n_and_layer_are_checked_and_zero_is_nothing(level):
    bound = Bound(cpu(level), SHAPE)
    before = [bound.rows.x.copy(), bound.kv.where.copy(), bound.rows.logits.copy()]
    b = bound.backend
    b.embed(0), b.attn_router(0, 0), b.expert_ffn(0, 0, 0, 4), b.head(0)
    after = [bound.rows.x, bound.kv.where, bound.rows.logits]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    for n in (17, -1):
        for call in (lambda n=n: b.embed(n), lambda n=n: b.attn_router(0, n), lambda n=n: b.head(n)):
            with pytest.raises(IndexError, match="n is outside"):
                call()
    with pytest.raises(IndexError, match="layer"):
        b.attn_router(2, 1)
    bound.rows.out_row[0] = 16
    with pytest.raises(IndexError, match="out_row"):
        b.head(1)


def test_reference_with_nothing_to_do():
    b = Bound(ReferenceBackend(), SHAPE).backend
    b.embed(0), b.attn_router(0, 0), b.expert_ffn(0, 0, 0, 4), b.head(0)


def test_close_is_idempotent_and_an_unbound_backend_says_so():
    b = cpu()
    for _ in range(2):
        b.close()
        with pytest.raises(RuntimeError, match="not bound"):
            b.head(1)
    Bound(b, SHAPE)
    Bound(b, SHAPE).step([(0, 1)])  # binding again frees what was bound
    b.close()


def wrong(weights, pages, kv, rows):
    """(message, arguments of bind) with one thing wrong each."""
    layer, a = weights.layers[0], weights.layers[0].attention
    short = replace(weights.head, data=np.zeros(9, np.uint8))
    other = Matrix(MatrixLayout(8, 8, "fp32"), np.zeros(65536, np.uint8))
    with_layer = lambda **new: replace(weights, layers=(replace(layer, **new), weights.layers[1]))  # noqa: E731
    with_attention = lambda **new: with_layer(attention=replace(a, **new))  # noqa: E731
    norm64 = np.ones(64)
    yield "final_norm must be float32", (replace(weights, final_norm=norm64), kv, pages, rows)
    yield "head must be", (replace(weights, head=other), kv, pages, rows)
    yield (
        "bytes, its layout needs",
        (replace(weights, head=short), kv, pages, rows),
    )
    yield "top_k 5", (replace(weights, top_k=5), kv, pages, rows)
    yield "layer 0 qkv must be", (with_attention(qkv=other), kv, pages, rows)
    yield "cannot share", (with_attention(kv_heads=3), kv, pages, rows)
    yield "head_dim 6 does not fit", (with_attention(head_dim=6), kv, pages, rows)
    yield "come together", (with_attention(q_norm=np.ones(8, np.float32)), kv, pages, rows)
    three = np.ones(3, np.float32)
    yield "neither per head nor flat", (with_attention(q_norm=three, k_norm=three), kv, pages, rows)
    yield "either a router gate or a dense network", (with_layer(gate=None), kv, pages, rows)
    yield "contiguous", (with_layer(gate=np.asfortranarray(layer.gate)), kv, pages, rows)
    yield "page table has", (weights, kv, ExpertPages(pages.frames, pages.table[:, :, :0].copy()), rows)
    yield "frames must have shape", (weights, kv, ExpertPages(pages.frames.reshape(-1), pages.table), rows)
    yield "kv.v must be float16", (weights, replace(kv, v=kv.v.astype(np.float32)), pages, rows)
    yield "no room for 16 rows", (weights, replace(kv, staging=len(kv.k) - 3), pages, rows)
    frozen = kv.where.copy()
    frozen.flags.writeable = False
    yield "must be writeable", (weights, replace(kv, where=frozen), pages, rows)
    yield "rows.logits must have shape", (weights, kv, pages, Rows.allocate(16, 64, 4, 2, 71))


@pytest.mark.parametrize("name", [LEVELS[0], "reference"])
def test_bind_names_what_is_wrong(name):
    bound = Bound(backend(name), SHAPE)
    seen = 0
    for message, arguments in wrong(bound.weights, bound.pages, bound.kv, bound.rows):
        with pytest.raises(ValueError, match=message):
            backend(name).bind(*arguments)
        seen += 1
    assert seen == 17


def test_constructor_refuses():
    for kind in (ReferenceBackend, cpu):
        with pytest.raises(ValueError, match="neither fast nor exact"):
            kind(precision="wrong")
    with pytest.raises(ValueError, match="threads"):
        cpu(threads=0)
    with pytest.raises(ValueError, match="none of amx, avx512, avx2, dotprod, neon, plain"):
        cpu("sse9")
