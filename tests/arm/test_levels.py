"""The aarch64 levels give the bits of this machine's best level, which tests/ops compares with the NumPy reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.ops.routing import KINDS, Routing
from colibri_lab.ops.types import NonFiniteLogits
from tests.ops.models import FORMATS, Bound, Shape, cpu, make, with_format
from tests.ops.test_kernels import SHAPES, STEPS
from tests.ops.test_runs import AtOneGo
from tests.ops.test_stages import InTwo

from .backend import ArmBackend, arrays
from .machine import LEVELS, Machine

pytestmark = pytest.mark.arm
MIXED = Shape(hidden=100, ffn=72, experts=6, top_k=3, shared=40, layers=3, dense=(1,), bias=True, window=6, vocab=90,
              qk_norm="head", tied=True)  # fmt: skip
LOCAL = replace(MIXED, recent=4, sinks=2, window=17, layers=4)
WIDE = Shape(hidden=320, ffn=290, experts=5, top_k=2, heads=6, kv_heads=2, head_dim=80, vocab=530, layers=1)


@cache
def poisoned(shape: Shape) -> Any:
    """A model for all levels and precisions: nothing writes into its weights and pages."""
    return make(shape, 31, poison=0xFF)


def state(bound: Bound) -> list[bytes]:
    """Every array that kernels write, as bytes, but for clocks."""
    bound.rows.spent[:] = 0
    routing = bound.weights.routing
    return [array.tobytes() for array in arrays((bound.rows, bound.kv, routing and (routing.counts, routing.span)))]


def same(machine: Machine, shape: Shape, precision: str, steps: Any = STEPS, **how: Any) -> None:
    """Both run the steps, and nothing that was written differs; routing: a router's kind and bits."""
    model = poisoned(shape)
    kind, threads = how.get("routing"), how.get("threads", 1)
    runs = []
    for backend in (cpu(precision=precision), ArmBackend(machine, precision, threads)):
        if kind:
            model = replace(model[0], routing=Routing.make(shape.layers, *kind, audit=True)), model[1]
        runs.append(Bound(backend, shape, model=model))
    for step in steps:
        logits = [bound.step(step, how.get("waves", ())) for bound in runs]
        assert np.isfinite(logits[0]).all()
        assert state(runs[0]) == state(runs[1])


def test_what_runs_is_the_level(machine: Machine) -> None:
    assert machine.isa == machine.level


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("dtype", "group"), FORMATS)
@pytest.mark.parametrize("shape", [MIXED, WIDE], ids=["mixed", "wide"])
def test_formats(machine: Machine, shape: Shape, dtype: str, group: int, precision: str) -> None:
    same(machine, with_format(shape, dtype, group), precision)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(machine: Machine, name: str, precision: str) -> None:
    same(machine, SHAPES[name], precision)


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32"])
def test_expert_local_attention(machine: Machine, kv_dtype: str) -> None:
    same(machine, replace(LOCAL, kv_dtype=kv_dtype), "exact", [[(0, t), (1, t + 1), (0, t + 2)] for t in range(12)])


@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_long_history(machine: Machine, head_dim: int) -> None:
    """Several tiles of tokens, groups of four heads and of one."""
    shape = Shape(heads=10, kv_heads=2, head_dim=head_dim, layers=1, positions=83, seats=1)
    rows = [[(0, t % 70) for t in range(first, min(first + 16, 83))] for first in range(0, 83, 16)]
    same(machine, shape, "exact", [row for step in rows[:-1] for row in (step[:15], step[15:])] + rows[-1:])


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("bits", [8, 11, 16])
@pytest.mark.parametrize("normalise", [True, False])
def test_routers(machine: Machine, kind: str, bits: int, normalise: bool) -> None:
    shape = replace(SHAPES["many"], normalise=normalise, hidden=300)
    same(machine, shape, "exact", routing=(kind, bits))


@pytest.mark.parametrize("bits", [8, 12])
def test_the_stages_of_a_router_in_two_calls(machine: Machine, bits: int) -> None:
    shape = SHAPES["many"]
    model = poisoned(shape)
    runs, backends = [], (cpu(), InTwo(ArmBackend(machine, "exact"), shape.dense))
    for backend in backends:
        routed = replace(model[0], routing=Routing.make(shape.layers, "two_stage", bits, audit=True)), model[1]
        runs.append(Bound(backend, shape, model=routed))
    for step in STEPS:
        for bound in runs:
            bound.step(step)
        assert state(runs[0]) == state(runs[1])
    assert backends[1].ids


def test_layers_at_one_go(machine: Machine) -> None:
    """Against one call after the other on this machine; it stops where an expert is not in memory."""
    away = tuple((layer, e) for layer in (0, 2) for e in range(0, MIXED.experts, 2))
    one = Bound(cpu(), MIXED, model=make(MIXED, 31))
    run = AtOneGo(ArmBackend(machine, "exact", 2), MIXED, model=make(MIXED, 31), away=away)
    for step in STEPS:
        assert np.array_equal(one.step(step), run.step(step)) and state(one) == state(run)
    assert run.stops


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_waves_threads_and_neighbours(machine: Machine, precision: str) -> None:
    """Rows in any company: two threads on the emulated core, one here, and experts in waves on both."""
    shape = replace(with_format(WIDE, "int4", 32), capacity=16, positions=64)
    rows = np.random.default_rng(5).integers(0, 530, (3, 11)).tolist()
    same(machine, shape, precision, [[(r % 3, t) for r, t in enumerate(row)] for row in rows], threads=2, waves=(2, 4))
    backend = ArmBackend(machine, precision)
    model = make(shape, 31)
    want = Bound(backend, shape, model=model).run(rows[0])
    assert np.array_equal(Bound(backend, shape, model=model, shuffle=2).run(rows[0], chunk=7, waves=(3,)), want)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(machine: Machine, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, experts = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    shape = Shape(
        hidden=draw(st.integers(1, 200)), ffn=draw(st.integers(1, 150)), experts=experts,
        top_k=draw(st.integers(1, min(experts, 6))), heads=kv_heads * draw(st.integers(1, 7)), kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 40)), vocab=draw(st.integers(70, 300)), layers=draw(st.integers(1, 2)),
        kv_dtype=draw(st.sampled_from(["fp16", "fp32"])), shared=draw(st.integers(0, 40)), tied=draw(st.booleans()),
    )  # fmt: skip
    shape = with_format(shape, *draw(st.sampled_from(FORMATS)))
    same(machine, shape, draw(st.sampled_from(["exact", "fast"])))


@pytest.mark.parametrize("dtype", ["int4", "fp32"])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 3e4, 1e18])
def test_sizes_at_the_ends_of_the_range(machine: Machine, dtype: str, size: float) -> None:
    """Subnormal, tiny and huge activations: rounding to fp16 and int8, exponentials and sums that overflow."""
    shape = Shape(dtype=dtype, embedding="fp32", kv_dtype="fp16")
    weights, pages = make(shape, 3)
    weights = replace(weights, embedding=weights.embedding * np.float32(size))
    runs = [Bound(b, shape, model=(weights, pages)) for b in (cpu(precision="fast"), ArmBackend(machine, "fast"))]
    for step in STEPS:
        for bound in runs:
            bound.step(step)
        assert state(runs[0]) == state(runs[1])


def test_what_is_not_a_number_is_found(machine: Machine) -> None:
    shape = Shape()
    weights, pages = make(shape, 3)
    weights.embedding[4] = np.nan
    bound = Bound(ArmBackend(machine, "fast"), shape, model=(weights, pages))
    bound.step([(0, 3)])
    with pytest.raises(NonFiniteLogits, match="layer 0 are not finite for row 1"):
        bound.step([(1, 3), (0, 4)])
    bound.rows.token[0] = shape.vocab
    with pytest.raises(IndexError, match="token"):
        bound.backend.embed(1)


def test_only_dotprod_needs_its_instruction() -> None:
    """A core without sdot ends the dotprod level, so that level does use it; the machine of `neon` is such a core."""
    shape = Shape(dtype="int4")
    model = make(shape, 3)
    core = Machine("dotprod", "cortex-a72")
    with pytest.raises(RuntimeError, match="-4"):
        Bound(ArmBackend(core, "fast"), shape, model=model).step([(0, 3)])
    for level in LEVELS[1:]:
        core = Machine(level, "cortex-a72")
        Bound(ArmBackend(core, "fast"), shape, model=model).step([(0, 3)])
        core.close()
