"""The whole CUDA backend on the simulator, against the oracle on awkward shapes; and contract one, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.int8 import quantise_row
from colibri_lab.ops.launch import Kernels
from colibri_lab.ops.layout import GROUPS
from colibri_lab.ops.products import upload
from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.routing import KINDS, Routing
from colibri_lab.ops.simulator import SimDevice
from colibri_lab.ops.types import MissingPage, NonFiniteLogits
from tests.ops.models import FORMATS, Bound, Shape, make, with_format
from tests.ops.test_kernels import SHAPES, STEPS, limit_of

TEXT = [3, 9, 4, 6, 1, 2, 44, 8, 8, 60, 5]


def sim(precision: str = "exact", order: str = "forward", seed: int = 1) -> CudaBackend:
    return CudaBackend(SimDevice(order, seed), precision)


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
        assert np.array_equal(got.kv.where, want.kv.where) and np.array_equal(got.kv.first, want.kv.first)
    assert np.array_equal(got.kv.seen, want.kv.seen)
    assert (got.rows.spent > 0).all(), "router and dispatch are timed"


def compare(shape: Shape, precision: str, seed: int = 0, order: str = "forward") -> None:
    model = make(shape, seed, poison=0xFF)
    same(Bound(sim(precision, order), shape, model=model), Bound(ReferenceBackend(precision), shape, model=model),
         precision)  # fmt: skip


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, precision: str) -> None:
    compare(SHAPES[name], precision, seed=1)


@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_formats(dtype: str, group: int) -> None:
    shape = with_format(Shape(hidden=100, ffn=140, shared=36, layers=1, tied=True), dtype, group)
    for precision in ("exact", "fast"):
        compare(shape, precision, seed=2)


@pytest.mark.parametrize("group", GROUPS)
def test_codes_of_activations_are_the_references(group: int) -> None:
    """Codes, steps and offsets to the bit: halves, zeros, tiny and huge values, NaN and infinity, a part of a group."""
    x = (np.random.default_rng(group).standard_normal((6, 300)) * 3).astype(np.float32)
    x[0], x[1, :40], x[2, 7], x[3, 9] = 0, 1e-38, np.nan, np.inf
    x[4, :64] = np.arange(64, dtype=np.float32) + 0.5
    x[4, 63] = 127
    groups = -(-300 // group)
    device = SimDevice("random", 2)
    codes, steps = device.empty((6, groups * group), np.int8), device.empty((6, groups), np.float32)
    offsets = device.empty((6, groups), np.int32)
    grid = (-(-groups // 4), 6, 1)
    Kernels(device)("quantise_rows", grid, 128, upload(device, x), codes, steps, offsets, 300, groups, group, -8)
    for row, q, step, offset in zip(x, codes, steps, offsets, strict=True):
        want_q, want_step = quantise_row(row, group)
        assert np.array_equal(q.reshape(groups, group), want_q)
        assert np.array_equal(step, want_step, equal_nan=True)
        assert np.array_equal(offset, -8 * want_q.sum(axis=1))


@pytest.mark.parametrize("order", ["backward", "random"])
def test_thread_orders_give_the_same_bits(order: str) -> None:
    shape = replace(SHAPES["extras"], window=3, layers=2)
    model = make(shape, 3)
    runs = [Bound(sim("fast", o, seed), shape, model=model) for o, seed in (("forward", 1), (order, 1), (order, 2))]
    for step in STEPS:
        first, *others = (run.step(step) for run in runs)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalise", [True, False])
def test_routers(kind: str, normalise: bool) -> None:
    """Choices, weights and counters of every router are the reference's."""
    shape = Shape(hidden=72, experts=40, top_k=3, dtype="fp32", group=0, kv_dtype="fp32", normalise=normalise)
    weights, pages = make(shape, 4)
    bound = []
    for backend in (sim(), ReferenceBackend()):
        routing = Routing.make(shape.layers, kind, 9, audit=True)
        bound.append(Bound(backend, shape, model=(replace(weights, routing=routing), pages)))
    same(*bound, "exact")
    got, want = (b.weights.routing for b in bound)
    assert np.array_equal(got.counts, want.counts)
    assert np.allclose(got.span, want.span, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 7])
def test_expert_local_attention(window: int) -> None:
    shape = Shape(recent=2, sinks=1, window=window, positions=40, layers=3, dense=(2,), kv_dtype="fp32")
    model = make(shape, 6)
    got, want = (Bound(b, shape, model=model) for b in (sim(), ReferenceBackend()))
    a, b = got.run(TEXT, chunk=2), want.run(TEXT, chunk=2)
    assert np.abs(a - b).max() <= 5e-6 * np.abs(b).max()
    assert np.array_equal(got.kv.seen, want.kv.seen) and got.kv.seen[0, 0] < got.kv.seen[0, 1]


def test_long_histories_are_split() -> None:
    """Past 256 tokens attention is joined from several blocks."""
    shape = Shape(positions=300, layers=1, seats=1, capacity=64, dtype="fp32", group=0, kv_dtype="fp32", ffn=4)
    model, ids = make(shape, 7), np.random.default_rng(7).integers(0, 70, 290).tolist()
    got = Bound(sim(), shape, model=model).run(ids, chunk=58)
    want = Bound(ReferenceBackend(), shape, model=model).run(ids, chunk=58)
    assert np.abs(got - want).max() <= 5e-6 * np.abs(want).max()


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_batches_waves_and_slots_change_no_bit(precision: str) -> None:
    shape = Shape(experts=6, top_k=3, shared=20, hidden=70)
    model = make(shape, 8)

    def run(shuffle: int | None = None, **how: object) -> NDArray[np.float32]:
        return Bound(sim(precision), shape, model=model, shuffle=shuffle).run(TEXT, **how)

    alone = run()
    assert np.array_equal(alone, run(chunk=5))
    assert np.array_equal(alone, run(chunk=11, waves=(1, 4)))
    assert np.array_equal(alone, run(chunk=3, waves=(2,), shuffle=5))


def test_pages_go_to_the_device_once() -> None:
    """An expert's run of frames is one transfer; what is there is not sent again; a frame that changes hands is."""
    shape = Shape(layers=1, experts=2, top_k=2, hidden=300, ffn=900)
    weights, pages = make(shape, 9)
    count = weights.expert[2].pages
    assert count > 2
    order = np.argsort(pages.table.reshape(-1))
    pages.frames[: 2 * count] = pages.frames[pages.table.reshape(-1)].copy()
    pages.table[:] = np.arange(2 * count, dtype=np.int32).reshape(pages.table.shape)
    backend = sim()
    bound = Bound(backend, shape, model=(weights, pages))
    first = bound.run([5])
    frames = backend.experts.frames
    assert frames is not None and (frames.pages_copied, frames.runs_copied) == (2 * count, 2) and len(order)
    bound.run([5, 6])
    assert frames.pages_copied == 2 * count
    pages.frames[:] = pages.frames[np.roll(np.arange(len(pages.frames)), 1)]
    pages.table[:] += 1
    again = Bound(backend, shape, model=(weights, pages)).run([5])
    assert np.array_equal(first, again)


def test_refusals() -> None:
    shape = Shape()
    bound = Bound(sim(), shape)
    rows, backend = bound.rows, bound.backend
    rows.token[0] = shape.vocab
    with pytest.raises(IndexError, match="token"):
        backend.embed(1)
    rows.token[0] = 1
    backend.embed(1)
    bound.kv.where[0, 0, 0] = -1
    rows.position[0] = 1
    with pytest.raises(IndexError, match="where is outside its range"):
        backend.attn_router(0, 1)
    rows.position[0] = 0
    backend.attn_router(0, 1)
    expert = int(rows.experts[0].min())
    bound.pages.table[0, expert] = -1
    with pytest.raises(MissingPage, match=f"layer 0 expert {expert} is not in memory"):
        backend.expert_ffn(0, 1, 0, shape.experts)
    backend.close()
    with pytest.raises(RuntimeError, match="not bound"):
        backend.embed(1)
    with pytest.raises(ValueError, match="head_dim 258"):
        Bound(sim(), Shape(head_dim=258, hidden=8, heads=1, kv_heads=1))


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_nan_stops_with_its_layer_and_row(precision: str) -> None:
    shape = Shape(dtype="int8", embedding="fp32")
    weights, pages = make(shape, 11)
    weights.embedding[7, 3] = np.nan
    with pytest.raises(NonFiniteLogits) as stopped:
        Bound(sim(precision), shape, model=(weights, pages)).step([(0, 1), (1, 7)])
    assert (stopped.value.layer, stopped.value.row) == (0, 1)
