"""Layers at one go write what one call after the other does, and stop where an expert is not in memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from colibri_lab.events import NO_EXPERT
from colibri_lab.ops.routing import KINDS, Routing
from colibri_lab.ops.runs import RUN_ROWS, Running
from colibri_lab.ops.types import ABSENT, COMING, NonFiniteLogits

from .models import LEVELS, Bound, Shape, cpu, make
from .test_stages import state

SHAPE = Shape(hidden=100, ffn=72, experts=12, top_k=3, layers=5, dense=(1,), window=5, qk_norm="head", shared=24)
LOCAL = replace(SHAPE, recent=4, sinks=2, window=17, dense=(0, 4))
STEPS = [[(0, t) for t in range(9)], [(1, 4)], [(0, 3), (1, 5), (2, 6), (1, 7)], [(2, 8)], [(0, 9), (2, 1)]]


class AtOneGo(Bound):
    """`away`: whose pages are taken from the table before each step, to be `how`, and come when they are missed."""

    def __init__(self, *arguments: Any, away: tuple[tuple[int, int], ...] = (), how: int = ABSENT, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.away, self.how, self.stops = away, how, list[int]()

    def step(self, tokens: list[tuple[int, int]], waves: tuple[int, ...] = ()) -> np.ndarray:
        rows, backend, n, last = self.rows, self.backend, len(tokens), self.shape.layers
        for r, (seat, token) in enumerate(tokens):
            rows.seat[r], rows.token[r], rows.position[r] = seat, token, self.next[seat]
            self.next[seat] += 1
        backend.embed(n)
        table = self.pages.table.copy()
        for at in self.away:
            self.pages.table[at] = self.how
        layer = 0
        while layer < last:
            stop = backend.run_layers(layer, n)
            for done in range(layer, min(stop + 1, last)):
                backend.runs.kv_dst[done, :n] = [self.free.pop() for _ in range(n)]
            backend.settle_layers(layer, stop, n)
            rows.kv_dst[:n] = backend.runs.kv_dst[min(stop, last - 1), :n]
            if stop < last:
                self.stops.append(stop)
                self.pages.table[stop] = table[stop]
                backend.expert_ffn(stop, n, 0, self.shape.experts)
            layer = stop + 1
        self.pages.table[:] = table
        rows.out_row[:n] = np.arange(n)
        backend.head(n)
        return rows.logits[:n].copy()


def both(name: str, shape: Shape, threads: int = 1, kind: str = "softmax", **more: Any) -> tuple[Bound, AtOneGo]:
    """The same model bound twice, with pages and counters of its own each."""
    made = []
    for what, many in ((Bound, 1), (AtOneGo, threads)):
        weights, pages = make(shape, 4)
        model = replace(weights, routing=Routing.make(shape.layers, kind, audit=True)), pages
        made.append(what(cpu(name, threads=many), shape, model=model, **(more if what is AtOneGo else {})))
    return made[0], made[1]


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("shape", [SHAPE, LOCAL, replace(SHAPE, kv_dtype="fp32", dense=())], ids=["a", "local", "fp32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_bits(name: str, shape: Shape, threads: int) -> None:
    one, run = both(name, shape, threads)
    assert isinstance(run.backend, Running)
    for step in STEPS:
        expected = one.step(step)
        assert np.array_equal(expected, run.step(step)) and np.isfinite(expected).all()
        assert state(one) == state(run)
        n = len(step)
        assert np.array_equal(run.backend.runs.experts[-1, :n], run.rows.experts[:n]) or shape.layers - 1 in shape.dense
    assert not run.stops and min(run.backend.runs.spent) > 0
    for layer in shape.dense:
        assert (run.backend.runs.experts[layer] == NO_EXPERT).all() and not run.backend.runs.weights[layer].any()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_routers(kind: str) -> None:
    one, run = both(LEVELS[0], SHAPE, 2, kind)
    for step in STEPS:
        assert np.array_equal(one.step(step), run.step(step)) and state(one) == state(run)


@pytest.mark.parametrize("how", [ABSENT, COMING])
@pytest.mark.parametrize("name", LEVELS)
def test_it_stops_where_an_expert_is_missing(name: str, how: int) -> None:
    """Half of the experts of each second layer are away: it stops where one of them is chosen, and nowhere else."""
    away = tuple((layer, e) for layer in (0, 2, 4) for e in range(0, 12, 2))
    one, run = both(name, SHAPE, away=away, how=how)
    for step in STEPS * 2:
        run.stops.clear()
        assert np.array_equal(one.step(step), run.step(step)) and state(one) == state(run)
        chosen = run.backend.runs.experts[:, : len(step)]
        assert run.stops == [layer for layer in (0, 2, 4) if (chosen[layer] % 2 == 0).any()]
    assert run.stops


@pytest.mark.parametrize("name", LEVELS)
def test_a_row_that_is_not_finite_is_named_with_its_layer(name: str) -> None:
    _, run = both(name, SHAPE)
    run.step([(0, 1)])
    gate = run.weights.layers[3].gate
    assert gate is not None
    kept, gate[:] = gate.copy(), math.nan
    with pytest.raises(NonFiniteLogits, match="layer 3 are not finite for row 0"):
        run.step([(0, 2), (1, 3)])
    gate[:] = kept
    assert np.isfinite(run.step([(2, 2)])).all()


def test_what_is_out_of_range() -> None:
    _, run = both(LEVELS[0], replace(SHAPE, capacity=RUN_ROWS + 8))
    backend, rows = run.backend, run.rows
    for first, n in ((0, RUN_ROWS + 1), (0, -1), (-1, 1), (6, 1)):
        with pytest.raises(IndexError):
            backend.run_layers(first, n)
    assert backend.run_layers(5, 1) == 5, "nothing is left to do"
    for first, last, n in ((-1, 1, 1), (0, 6, 1), (0, 1, RUN_ROWS + 1), (0, 1, -1)):
        with pytest.raises(IndexError):
            backend.settle_layers(first, last, n)
    run.step([(0, 1)])
    backend.runs.kv_dst[3, 0] = run.kv.staging + rows.capacity
    with pytest.raises(IndexError, match="kv_dst"):
        backend.settle_layers(0, 5, 1)
    rows.seat[0] = 99
    with pytest.raises(IndexError, match="seat"):
        backend.run_layers(0, 1)
    backend.close()
    for call in (lambda: backend.run_layers(0, 1), lambda: backend.settle_layers(0, 1, 1)):
        with pytest.raises(RuntimeError, match="not bound"):
            call()
