"""Layers at one go inside the engine: tokens, books and events of one layer after another, and when it is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colibri_lab.config import EVICTION
from colibri_lab.engine import Engine
from colibri_lab.errors import RequestError
from colibri_lab.ops.types import NonFiniteLogits

from .conftest import Load
from .test_failures import clean, ids

PROMPT = "The young lady was walking along the river, and then she saw a boat that nobody had ever seen before."
ALL, FEW = {"expert_cache_bytes": "1GiB"}, {"expert_cache_bytes": "2MiB"}
ROWS = [[5, 6, 7], [*range(40, 75)], [9], [11, 12, 13, 14]]


class Calls:
    """How often the step called what of its backend."""

    def __init__(self, engine: Engine) -> None:
        self.seen: dict[str, int] = {}
        backend = engine._parts.backend
        for name in ("attn_router", "expert_ffn", "run_layers", "head"):
            self._count(backend, name)

    def _count(self, backend: Any, name: str) -> None:
        call = getattr(backend, name)

        def counted(*arguments: Any) -> Any:
            self.seen[name] = self.seen.get(name, 0) + 1
            return call(*arguments)

        setattr(backend, name, counted)


def fill(engine: Engine) -> None:
    """All experts into memory."""
    for layer in range(8):
        engine._parts.pager.acquire(layer, range(16))


def books(engine: Engine) -> dict[str, Any]:
    """All counters but times."""
    found = engine.counters()
    pager = {k: v for k, v in found["pager"].items() if not k.endswith(("_s", "_ns"))}
    return {"pager": pager, "kv": found["kv"], "dispatch": found["dispatch"], "router": found.get("router")}


def lived(engine: Engine) -> list[Any]:
    """What several requests say, and what telemetry heard of pages and slots meanwhile, but for clocks."""
    cursor = engine.telemetry.cursor()
    said: list[Any] = [
        (i, t.id, t.logprob, t.experts.tobytes(), t.weights.tobytes())
        for i, t in engine.generate_batch(ROWS, max_tokens=24, temperature=0.8, seed=3)
    ]
    said += [(t.id, t.logprob) for t in engine.generate(PROMPT, max_tokens=40)]
    said.append(engine.logits([5, 6, 7, 8, 9]).tobytes())
    new = engine.telemetry.read(cursor)
    for events in (new.tokens, new.pages, new.slots):
        names = [name for name in events.dtype.names if not name.endswith("_ns")]
        said.append(np.array(events[names].tolist(), object).tolist())
    return said


@pytest.mark.parametrize("how", [
    ALL, FEW, FEW | {"attention": "expert_local"}, FEW | {"pin_after_tokens": 4}, ALL | {"prefetcher": "next_gate"},
    ALL | {"engine_mode": "async"}, ALL | {"router": "two_stage"}, {"expert_cache_bytes": "768KiB"},
    *(FEW | {"eviction_policy": policy} for policy in EVICTION),
], ids=str)  # fmt: skip
def test_nothing_differs(load: Load, how: dict[str, Any]) -> None:
    run, led = (load(max_batch_size=4, prefill_chunk=24, **how) for _ in range(2))
    calls = Calls(run)
    led._parts.transformer.whole = None
    if how["expert_cache_bytes"] == "1GiB":
        fill(run), fill(led)
    for _ in range(2):
        assert lived(run) == lived(led)
        assert books(run) == books(led)
        assert [run._parts.kv.table(s) for s in range(4)] == [led._parts.kv.table(s) for s in range(4)] and clean(run)
    assert calls.seen["run_layers"] > 40


def test_a_step_with_all_in_memory_is_one_call(load: Load) -> None:
    engine = load()
    fill(engine)
    calls = Calls(engine)
    assert len(ids(engine.generate([5, 6, 7], max_tokens=20))) == 20
    assert calls.seen == {"run_layers": 20, "head": 20}


def test_one_that_lacks_experts_comes_back_once_a_layer(load: Load) -> None:
    engine, cursor = load(**FEW), None
    calls = Calls(engine)
    cursor = engine.telemetry.cursor()
    list(engine.generate(PROMPT, max_tokens=40))
    faults = engine.telemetry.read(cursor).pages
    faults = faults[faults["kind"] == 0]
    layers = len({(int(step), int(layer)) for step, layer in zip(faults["step"], faults["layer"], strict=True)})
    decoded = calls.seen["expert_ffn"]
    assert 0 < decoded <= layers, "a layer is led only where something is read"
    assert "attn_router" in calls.seen, "a prompt of more than 32 rows is led as ever"


@pytest.mark.parametrize("how", [{"engine_mode": "async"}, {"prefetcher": "next_gate"}])
def test_who_reads_ahead_or_behind_is_asked_between_the_layers(load: Load, how: dict[str, Any]) -> None:
    engine = load(**FEW, **how)
    calls = Calls(engine)
    list(engine.generate([5, 6, 7], max_tokens=8))
    assert "run_layers" not in calls.seen and calls.seen["attn_router"] == 8 * 8


@pytest.mark.parametrize("how", [{"engine_mode": "async"}, {"prefetcher": "next_gate"}])
def test_nobody_is_asked_where_all_have_room_and_the_step_before_read_nothing(load: Load, how: dict[str, Any]) -> None:
    plain, engine = load(**ALL), load(**ALL, **how)
    said = ids(plain.generate(PROMPT, max_tokens=120))
    calls = Calls(engine)
    ids(engine.generate([5], max_tokens=1))
    assert calls.seen == {"attn_router": 8, "expert_ffn": 8, "head": 1}, "all of the first step is still to be read"
    assert ids(engine.generate(PROMPT, max_tokens=120)) == said and calls.seen["run_layers"] > 20
    pager, steps = engine._parts.pager, calls.seen["head"]
    assert pager.fits_all and (pager.full or pager.resident < 128)
    engine._parts.pager.resize(64 * pager.frames.run_bytes)  # from now on experts leave
    calls.seen.clear()
    assert ids(engine.generate(PROMPT, max_tokens=40)) == said[:40] and not pager.fits_all
    assert "run_layers" not in calls.seen and steps > 100


def test_a_prefetcher_that_is_taken_away_frees_the_way(load: Load) -> None:
    engine = load(**FEW, prefetcher="next_gate")
    calls = Calls(engine)
    said = ids(engine.generate([5, 6, 7], max_tokens=8))
    engine.settings.prefetcher = None
    assert ids(engine.generate([5, 6, 7], max_tokens=8)) == said and calls.seen["run_layers"] >= 8


def test_a_router_of_ones_own_is_asked(load: Load) -> None:
    class Mine:
        def select(self, layer: int, logits: Any) -> Any:
            return [[0, 1]] * len(logits), [[0.5, 0.5]] * len(logits)

    engine = load(router=Mine())
    calls = Calls(engine)
    assert {tuple(t.experts[0].tolist()) for t in engine.generate([5], max_tokens=4)} == {(0, 1)}
    assert "run_layers" not in calls.seen


def test_a_request_that_is_not_finite_ends_alone(load: Load) -> None:
    engine = load(max_batch_size=4)
    good = ids(engine.generate([5, 6, 7], max_tokens=6))
    fill(engine)
    rows, backend = engine._parts.rows, engine._parts.backend
    run = backend.run_layers

    def fail(first: int, n: int) -> int:
        stop = run(first, n)
        for row in range(n):
            if first <= 3 < stop and rows.token[row] == 2500:
                raise NonFiniteLogits(3, row)
        return stop

    backend.run_layers = fail
    got: dict[int, list[int]] = {0: [], 2: []}
    with pytest.raises(RequestError, match=r"layer 3 are not finite at position 2 \(token id 2500\)"):
        for i, token in engine.generate_batch([[5, 6, 7], [1, 2, 2500], [5, 6, 7]], max_tokens=6):
            got[i].append(token.id)
    assert got == {0: good, 2: good} and clean(engine)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_interrupt_leaves_nothing_behind(load: Load, mode: str) -> None:
    engine = load(engine_mode=mode, **ALL)
    fill(engine)
    said = ids(engine.generate([5, 6, 7], max_tokens=6))
    transformer, backend = engine._parts.transformer, engine._parts.backend
    run = backend.run_layers

    def press(first: int, n: int) -> int:
        transformer.pressed.append(object())
        return run(first, n)

    backend.run_layers = press
    tokens = engine.generate([5, 6, 7], max_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    tokens.close()
    backend.run_layers = run
    transformer.pressed.clear()
    assert ids(engine.generate([5, 6, 7], max_tokens=6)) == said and clean(engine)


def test_a_fault_in_async_mode_is_named_with_its_layer(load: Load) -> None:
    engine = load(engine_mode="async", **ALL)
    fill(engine)
    said = ids(engine.generate([5], max_tokens=3))
    gate = engine._parts.transformer.backend._bound.weights.layers[5].gate
    kept = gate.copy()
    gate[:] = np.nan
    with pytest.raises(RequestError, match="layer 5 are not finite"):
        next(engine.generate([5]))
    gate[:] = kept
    inner = engine._parts.kv.place

    def place(layer: int, *more: Any) -> Any:
        if layer == 6:
            raise RuntimeError("no place")
        return inner(layer, *more)

    engine._parts.kv.place = place  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no place") as placed:
        next(engine.generate([5]))
    assert placed.value.__notes__ == ["in stage place, layer 6, rows 0 to 0"]
    engine._parts.kv.place = inner  # type: ignore[method-assign]
    assert ids(engine.generate([5], max_tokens=3)) == said and clean(engine)


def test_times_of_a_run_are_told_by_stage(load: Load) -> None:
    engine = load()
    cursor = engine.telemetry.cursor()
    list(engine.generate([5, 6, 7], max_tokens=30))
    tokens = engine.telemetry.read(cursor).tokens
    stages = [tokens[f"{name}_ns"].astype(np.int64) for name in ("attention", "router", "dispatch", "experts", "head")]
    assert all((stage > 0).all() for stage in stages)
    rest = tokens["latency_ns"].astype(np.int64) - sum(stages) - tokens["io_ns"]
    assert (rest >= 0).all(), "no time is counted twice"
