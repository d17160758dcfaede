"""Reads between the stages of two_stage in a running engine: the same bits with and without, and counters prove it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.engine import Engine
from colibri_lab.ops.types import Staged
from colibri_lab.pager.queue import QueueTransfer
from colibri_lab.pager.reader import Reader
from tests.makers import make
from tests.placement.poison import poisoned

from .conftest import Load

PROMPT = "The young lady was walking along the river, and then she saw a boat that nobody had ever seen before."
TWO = {"router": "two_stage", "prefetcher": "next_gate"}


@pytest.fixture(scope="module")
def close(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts' gates no 8-bit code tells apart: the first stage names the lowest indices, wrongly."""
    made = make("qwen3_moe", 5, num_experts=24, num_experts_per_tok=3, norm_topk_prob=True)
    for name, gate in made.tensors.items():
        if name.endswith("mlp.gate.weight"):
            made.tensors[name] = (gate[:1] + np.float32(1e-5) * gate).astype(np.float32)
    at = tmp_path_factory.mktemp("close")
    return convert(made.save(at / "hf"), at / "out", quantize="fp32")


def early(engine: Engine, least_rows: int = 1) -> Engine:
    """The engine, whose calls are made in two from so many rows on. Reads have all the time that they need: those of
    before have ended when the first stage begins, those between the stages when the choice is known."""
    between, ahead = engine._parts.early, engine._parts.pager.ahead
    assert between is not None and between.least_rows > 100, "the model is small: no call of its own is worth two"
    between.least_rows = least_rows
    attend = between.attend

    def patient(*arguments: Any) -> int:
        for flight in ahead.flights.values():
            flight.wait()
        spent = attend(*arguments)
        for flight in ahead.flights.values():
            flight.wait()
        return spent

    between.attend = patient  # type: ignore[method-assign]
    return engine


def said(engine: Engine, prompt: Any = PROMPT, count: int = 12) -> list[Any]:
    return [
        (t.id, t.logprob, t.experts.tobytes(), t.weights.tobytes()) for t in engine.generate(prompt, max_tokens=count)
    ]


def books(engine: Engine) -> dict[str, float]:
    """Every guess is accounted for, every frame is somebody's or free; the counters of early reads."""
    pager = engine._parts.pager
    assert pager.frames.free + pager.resident + len(pager.ahead.flights) == pager.frames.capacity
    assert not pager._held and not (pager.table == -2).any()
    c = {k.removeprefix("early_"): v for k, v in pager.counters().items() if k.startswith("early_")}
    open_ = sum(flight.early for flight in pager.ahead.flights.values())
    assert c["issued"] == c["hits"] + c["late"] + c["wasted"] + c["cancelled"] + c["failed"] + open_
    assert c["bytes"] == pager.frames.run_bytes * (c["useful"] + c["wasted"])
    return c


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("budget", ["256KiB", "1MiB", "4MiB"])
@pytest.mark.parametrize("way", ["queue", "threads"])
def test_on_and_off_say_the_same(load: Load, mode: str, budget: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "threads":
        monkeypatch.setattr(QueueTransfer, "open", lambda *arguments: None)
    how = {"engine_mode": mode, "expert_cache_bytes": budget, "precision": "exact", "kv_cache_dtype": "fp32"}
    ids = list(range(3, 70))
    with poisoned():
        soft, off, on = load(**how), load(**how, **TWO), early(load(**how, **TWO))
        right, bits = said(soft), soft.logits(ids).tobytes()
        for engine in (off, on):
            assert said(engine) == right and engine.logits(ids).tobytes() == bits
    assert soft._parts.early is None and not any(books(off).values())
    c = books(on)
    assert c["issued"] > 0 and c["useful"] > 0 and c["bytes"] > 0
    assert on.counters()["pager"]["prefetch_issued"] > c["issued"], "those of the prefetcher are there too"
    assert on.counters()["router"] == off.counters()["router"]


@pytest.mark.parametrize("rings", [2, 16])
def test_groups_of_an_asynchronous_step(load: Load, rings: int) -> None:
    how = {"expert_cache_bytes": "1MiB", "engine_mode": "async", "dispatch_ring_size": rings}
    prompts = [list(range(3 + i, 12 + 2 * i)) for i in range(6)]
    runs = []
    for engine in (load(**how), early(load(**how, **TWO))):
        runs.append([(i, token.id, token.logprob) for i, token in engine.generate_batch(prompts, max_tokens=8)])
    assert sorted(runs[0]) == sorted(runs[1]) and books(engine)["useful"] > 0
    assert engine.counters()["dispatch"]["ahead_s"] > 0


def test_the_prefetcher_is_its_switch(load: Load) -> None:
    engine = early(load(router="two_stage", expert_cache_bytes="1MiB"))
    right = said(engine, count=6)
    assert not any(books(engine).values())
    engine.settings.prefetcher = "history"
    assert said(engine, count=6) == right
    issued = books(engine)["issued"]
    assert issued > 0
    engine.settings.prefetcher = "none"
    assert said(engine, count=6) == right and books(engine)["issued"] == issued
    engine.settings.set(prefetcher="next_gate", expert_cache_bytes=1 << 40)
    said(engine, list(range(3, 400)), count=2)
    everything = engine._parts.pager
    while everything.resident < everything.frames.most:  # ask for all that is left
        for layer in range(8):
            everything.acquire(layer, range(16))
    issued = books(engine)["issued"]
    said(engine, count=6)
    assert books(engine)["issued"] == issued, "all are there"


def test_one_row_is_one_call(load: Load) -> None:
    """As it comes, neither a decode step nor a prompt of so small a model is cut; from so many rows on, prompts are."""
    engine = load(**TWO, expert_cache_bytes="1MiB")
    said(engine, list(range(3, 80)))
    assert not any(books(engine).values())
    early(engine, 20)
    calls: list[int] = []
    stage = engine._parts.backend.first_stage
    engine._parts.backend.first_stage = lambda layer, n, at: (calls.append(n), stage(layer, n, at))[1]
    said(engine, list(range(3, 80)))
    assert calls and min(calls) >= 20


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_wrong_ids_are_not_read_once_the_choice_is_known(
    close: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader, held up until the layer's choice is known: whatever else was guessed wrongly is cancelled by then."""
    monkeypatch.setattr(QueueTransfer, "open", lambda *arguments: None)
    known, read = threading.Event(), Reader.read

    def slow(reader: Reader, job: Any) -> None:
        if threading.current_thread().name == "colibri-ahead":
            assert known.wait(20)
        read(reader, job)

    monkeypatch.setattr(Reader, "read", slow)
    prompt = list(range(3, 33))
    how = {"precision": "exact", "kv_cache_dtype": "fp32", "threads": 1, "io_threads": 1}
    with Engine.load(close, **how) as whole:
        right = said(whole, prompt)
        size = whole.describe()["expert_bytes"]
    budget = {"expert_cache_bytes": 14 * size, "expert_prefetch_pages": 64}
    with poisoned(), Engine.load(close, **how, **budget, **TWO, engine_mode=mode) as engine:
        between = engine._parts.early
        assert between is not None
        between.least_rows, attend = 1, between.attend

        def in_order(*arguments: Any) -> int:
            known.clear()
            try:
                return attend(*arguments)
            finally:
                known.set()

        monkeypatch.setattr(between, "attend", in_order)
        known.set()
        assert said(engine, prompt) == right
        c = books(engine)
        assert c["issued"] > 2 and c["cancelled"] > 0, "the lowest indices were wanted, and others chosen"
        engine.settings.prefetcher = "none"  # gives up all that is on its way
        assert said(engine, prompt) == right
        assert books(engine)["issued"] == c["issued"] and engine._parts.pager.ahead.most == 0


def test_reference_backend(load: Load) -> None:
    how = {"backend": "reference", "expert_cache_bytes": "1MiB"}
    off, on = load(**how, **TWO), early(load(**how, **TWO))
    assert said(off, list(range(3, 20)), 3) == said(on, list(range(3, 20)), 3)
    assert books(on)["useful"] > 0


def test_other_backends_have_no_stages(load: Load) -> None:
    engine = load(backend="sim", **TWO)
    assert engine._parts.early is None and not isinstance(engine._parts.backend, Staged)


def test_a_foreign_router_has_none_either(load: Load) -> None:
    class First:
        def select(self, layer: int, logits: Any) -> Any:
            order = (-logits).argsort(axis=1, kind="stable")[:, :2]
            return order, np.full(order.shape, 0.5, np.float32)

    assert load(router=First(), prefetcher="history")._parts.early is None


def test_a_followed_token_has_both_calls(load: Load) -> None:
    prompt = list(range(3, 40))
    plain = load(router="two_stage", expert_cache_bytes="1MiB").follow(prompt)
    engine = early(load(**TWO, expert_cache_bytes="1MiB"))
    path = engine.follow(prompt)
    assert books(engine)["issued"] > 0 and np.array_equal(path.logits, plain.logits)
    for mine, other in zip(path.layers, plain.layers, strict=True):
        for name in ("entered", "attended", "ffn_in", "router_logits", "experts", "weights", "left"):
            assert np.array_equal(getattr(mine, name), getattr(other, name)), name
