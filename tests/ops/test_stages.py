"""attn_router in two calls, one for each stage of two_stage: the bits of one call, and ids in between."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops import route
from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.routing import Routing, gate_codes
from colibri_lab.ops.types import NonFiniteLogits, Staged

from .models import LEVELS, Bound, Shape, cpu, make

BACKENDS = [*LEVELS, "reference"]
SHAPE = Shape(hidden=100, experts=40, top_k=6, layers=3, dense=(1,), window=5, qk_norm="head", shared=24)
LOCAL = replace(SHAPE, recent=4, sinks=2, window=17, dense=())
STEPS = [[(0, t) for t in range(9)], [(1, 4)], [(0, 3), (1, 5), (2, 6), (1, 7)]]


class InTwo:
    """A backend whose attn_router is two calls, in parts of at most so many rows; `ids` has what lay in between."""

    def __init__(self, backend: Any, dense: tuple[int, ...], most: int = 99) -> None:
        self._backend, self._dense, self._most = backend, dense, most
        self.ids: list[tuple[int, np.ndarray, np.ndarray]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def bind(self, weights: Any, kv: Any, pages: Any, rows: Any) -> None:
        self.rows = rows
        self._backend.bind(weights, kv, pages, rows)

    def attn_router(self, layer: int, n: int) -> None:
        if layer in self._dense:
            self._backend.attn_router(layer, n)
            return
        for at in range(0, n, self._most):
            count = min(self._most, n - at)
            self._backend.first_stage(layer, count, at)
            some = slice(at, at + count)
            self.ids.append((layer, self.rows.ffn_in[some].copy(), self.rows.experts[some].copy()))
            self._backend.second_stage(layer, count, at)


def backend(name: str, threads: int = 1) -> Any:
    return ReferenceBackend() if name == "reference" else cpu(name, threads=threads)


def routed(shape: Shape, bits: int = 8, audit: bool = True) -> Any:
    weights, pages = make(shape, 4)
    return replace(weights, routing=Routing.make(shape.layers, "two_stage", bits, audit)), pages


def state(bound: Bound) -> list[bytes]:
    bound.rows.spent[:] = 0
    arrays = [getattr(part, f.name) for part in (bound.rows, bound.kv) for f in fields(part)]
    routing = bound.weights.routing
    return [a.tobytes() for a in (*arrays, routing.counts, routing.span) if isinstance(a, np.ndarray)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize(("normalise", "shape"), [(True, SHAPE), (False, SHAPE), (True, LOCAL)])
def test_two_calls_write_what_one_does(name: str, bits: int, normalise: bool, shape: Shape) -> None:
    shape = replace(shape, normalise=normalise)
    one = Bound(backend(name), shape, model=routed(shape, bits))
    two = Bound(InTwo(backend(name, 2), shape.dense), shape, model=routed(shape, bits))
    for step in STEPS:
        assert np.array_equal(one.step(step), two.step(step))
        assert state(one) == state(two)
    assert isinstance(backend(name), Staged)


@pytest.mark.parametrize("name", LEVELS)
def test_parts_of_a_step(name: str) -> None:
    shape = replace(SHAPE, dense=())
    one = Bound(backend(name), shape, model=routed(shape))
    parts = Bound(InTwo(backend(name), (), 1), shape, model=routed(shape))
    for step in ([(0, 3), (1, 4)], [(1, 5), (2, 9), (0, 8)]):  # rows of one seat would have to see each other
        assert np.array_equal(one.step(step), parts.step(step))
    assert state(one) == state(parts)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("bits", [8, 12])
def test_ids_between_the_stages_are_the_references(name: str, bits: int) -> None:
    made = InTwo(backend(name), SHAPE.dense)
    bound = Bound(made, SHAPE, model=routed(SHAPE, bits))
    for step in STEPS:
        bound.step(step)
    assert len(made.ids) == 2 * len(STEPS)
    for layer, x, ids in made.ids:
        codes = gate_codes(bound.weights.layers[layer].gate, bits)
        want = [route.first_stage(codes, row, SHAPE.top_k, bits)[1].tolist() for row in x]
        assert ids.tolist() == want and (ids >= 0).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_ids_that_are_wrong_and_rows_without(name: str) -> None:
    """Gates that no integer tells apart: the lowest indices between the stages, softmax's choice in the end."""
    weights, pages = routed(SHAPE)
    gate = weights.layers[0].gate
    close = (gate[:1] + 1e-6 * gate).astype(np.float32)
    layers = (replace(weights.layers[0], gate=close), *weights.layers[1:])
    weights = replace(weights, layers=layers)
    soft = Bound(backend(name), SHAPE, model=(replace(weights, routing=Routing.make(3)), pages))
    bound = Bound(backend(name), SHAPE, model=(weights, pages))
    for made in (soft, bound):
        made.rows.seat[:2], made.rows.token[:2], made.rows.position[:2] = [0, 1], [3, 4], 0
        made.backend.embed(2)
        made.rows.x[1] = 0  # and so it stays, without a bias
    soft.backend.attn_router(0, 2)
    bound.backend.first_stage(0, 2)
    assert (bound.rows.experts[1] == -1).all(), "there is no bound"
    assert sorted(bound.rows.experts[0].tolist()) != sorted(soft.rows.experts[0].tolist())
    bound.backend.second_stage(0, 2)
    assert bound.rows.experts[:2].tobytes() == soft.rows.experts[:2].tobytes()
    assert bound.rows.weights[:2].tobytes() == soft.rows.weights[:2].tobytes()
    assert bound.weights.routing.counts[0, 2] == 2, "both fell back"


@pytest.mark.parametrize("name", BACKENDS)
def test_no_second_stage_without_its_first(name: str) -> None:
    bound = Bound(backend(name), SHAPE, model=routed(SHAPE))
    bound.rows.seat[:3] = range(3)
    b = bound.backend
    b.embed(3)
    for wrong in (lambda: b.second_stage(0, 3), lambda: b.first_stage(1, 3)):  # nothing before it; a dense layer
        with pytest.raises(IndexError):
            wrong()
    for spoiled in (
        lambda: b.second_stage(0, 2),
        lambda: b.second_stage(2, 3),
        lambda: b.second_stage(0, 2, 1),
        lambda: (b.second_stage(0, 3), b.second_stage(0, 3)),
        lambda: (b.attn_router(0, 3), b.second_stage(0, 3)),
    ):
        b.first_stage(0, 3)
        with pytest.raises(IndexError):
            spoiled()
    b.first_stage(0, 0), b.second_stage(0, 0)
    other = Bound(backend(name), SHAPE)
    with pytest.raises(IndexError, match="layer"):
        other.backend.first_stage(0, 1)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_finite_is_named_by_the_second_stage(name: str) -> None:
    bound = Bound(backend(name), SHAPE, model=routed(SHAPE))
    bound.rows.seat[:3], bound.rows.token[:3] = [0, 1, 2], [3, 4, 5]
    bound.backend.embed(3)
    bound.rows.x[2, 7] = np.nan
    with np.errstate(all="ignore"):
        bound.backend.first_stage(0, 3)
        assert (bound.rows.experts[2] == -1).all() and (bound.rows.experts[:2] >= 0).all()
        with pytest.raises(NonFiniteLogits) as caught:
            bound.backend.second_stage(0, 3)
    assert (caught.value.layer, caught.value.row) == (0, 2)
