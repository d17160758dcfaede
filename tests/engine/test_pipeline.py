"""`engine_mode: async` inside the engine: its counters prove it, and whatever a stage dies of leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.config import EVICTION
from colibri_lab.engine import Engine
from colibri_lab.errors import ConfigError, PagerError, RouterError
from colibri_lab.pager.queue import QueueTransfer
from colibri_lab.pager.reader import Reader

from .conftest import Load
from .test_failures import clean, ids

SMALL = {"engine_mode": "async", "expert_cache_bytes": "1MiB"}
PROMPT = "The young lady was walking along the river, and then she saw a boat that nobody had ever seen before."


def idle(engine: Engine) -> bool:
    """No unit, no ticket, no read is left over, and every frame is somebody's or free."""
    parts = engine._parts
    pager, rings = parts.pager, parts.transformer.rings
    guesses = len(pager.ahead.flights) if pager.ahead else 0
    books = pager.frames.free + pager.resident + guesses == pager.frames.capacity
    return books and len(rings) == 0 and not pager._held and not (pager.table == -2).any()


def test_counters_prove_the_mode(load: Load) -> None:
    sync = load(expert_cache_bytes="1MiB")
    said = ids(sync.generate(PROMPT, max_tokens=20))
    assert "units" not in sync.counters()["dispatch"] and sync.describe()["engine_mode"] == "sync"
    assert sync.describe()["direct_io"] == (sync.describe()["reads"] == "queue")
    whole, rings = load(**SMALL), load(**SMALL, dispatch_ring_size=8, dispatch_watermark=0.5)
    for engine in (whole, rings):
        assert ids(engine.generate(PROMPT, max_tokens=20)) == said and engine.describe()["engine_mode"] == "async"
        assert idle(engine) and clean(engine)
    one, many = (engine.counters()["dispatch"] for engine in (whole, rings))
    steps = whole.counters()["engine"]["steps"]
    assert (one["units"], one["groups"], one["split_steps"], one["ring_switches"]) == (8 * steps, steps, 0, 0)
    assert many["groups"] == many["units"] / 8 > steps and many["split_steps"] > 0 and many["ring_switches"] > 0
    assert many["ring_size"] == 8 and many["ring_fill_most"] == 4 and many["ring_fill_share_most"] == 0.5
    assert one["bytes_copied"] == many["bytes_copied"] == 0
    pager = whole.counters()["pager"]
    assert one["reads_arriving"] + one["reads_hidden"] == pager["faults"] > 100
    assert 0 < pager["io_wait_s"] <= one["read_s"] and all(one[f"{s}_s"] > 0 for s in ("attention", "experts", "place"))
    assert many["reads_hidden"] > 0, "the reads of one group end while the other computes"


def test_with_all_experts_in_memory_a_step_runs_as_a_synchronous_one(load: Load) -> None:
    engine = load(engine_mode="async", expert_cache_bytes="1GiB")
    said = ids(engine.generate(PROMPT, max_tokens=400))
    assert said == ids(load().generate(PROMPT, max_tokens=400))
    told, pager, steps = (engine.counters()[name] for name in ("dispatch", "pager", "engine"))
    if pager["experts_resident"] < 128:  # some expert was never asked for
        for layer in range(8):
            engine._parts.pager.acquire(layer, range(16))
        before = engine.counters()["engine"]["steps"], engine.counters()["dispatch"]["full_steps"]
        assert ids(engine.generate(PROMPT, max_tokens=20)) == said[:20]
        after = engine.counters()["engine"]["steps"], engine.counters()["dispatch"]["full_steps"]
        assert after[1] - before[1] == after[0] - before[0] > 0
    else:
        assert 0 < told["full_steps"] < steps["steps"]
    engine.settings.expert_cache_bytes = "1MiB"
    full = engine.counters()["dispatch"]["full_steps"]
    assert ids(engine.generate(PROMPT, max_tokens=20)) == said[:20]
    assert engine.counters()["dispatch"]["full_steps"] == full and idle(engine)


def test_a_fault_with_all_experts_in_memory_is_named_with_its_stage(load: Load) -> None:
    class Wrong:
        wrong = False

        def select(self, layer: int, logits: Any) -> Any:
            return ([[99, 1]], [[1.0, 1.0]]) if self.wrong and layer == 5 else Follow().select(layer, logits)

    router = Wrong()
    engine = load(engine_mode="async", expert_cache_bytes="1GiB", router=router, kv_cache_max_slots=64)
    for layer in range(8):
        engine._parts.pager.acquire(layer, range(16))
    said = ids(engine.generate([3, 4], max_tokens=4))
    router.wrong = True
    with pytest.raises(RouterError, match="layer 5") as caught:
        next(engine.generate([3]))
    assert caught.value.__notes__ == ["in stage router, layer 5, rows 0 to 0"] and idle(engine)
    router.wrong = False
    ffn = engine._parts.backend.expert_ffn
    engine._parts.transformer.backend.expert_ffn = lambda layer, *more: ffn(layer + 99, *more)
    with pytest.raises(IndexError) as outside:
        next(engine.generate([3]))
    assert outside.value.__notes__ == ["in stage experts, layer 0, rows 0 to 0"]
    engine._parts.transformer.backend.expert_ffn = ffn
    assert ids(engine.generate([3, 4], max_tokens=4)) == said and idle(engine) and clean(engine)
    assert engine.counters()["dispatch"]["full_steps"] > 0 == engine.counters()["dispatch"]["units"]


NAMED = ("attention", "router", "dispatch", "io", "experts")


def test_the_wait_is_told_to_telemetry(load: Load) -> None:
    engine = load(**SMALL)
    cursor = engine.telemetry.cursor()
    list(engine.generate(PROMPT, max_tokens=10))
    batch = engine.telemetry.read(cursor)
    assert batch.tokens["io_ns"].sum() > 0 < batch.tokens["attention_ns"].sum()
    total = sum(int(batch.tokens[f"{stage}_ns"].sum()) for stage in NAMED)
    decode = batch.tokens[batch.tokens["phase"] == 1]
    assert total > 0 and (sum(decode[f"{stage}_ns"] for stage in NAMED) <= decode["latency_ns"]).all()
    assert (decode["router_ns"] > 0).all() and (decode["dispatch_ns"] > 0).all()
    assert batch.tokens["faults"].sum() == engine.counters()["pager"]["faults"]


def test_rings_need_async() -> None:
    with pytest.raises(ConfigError, match="dispatch_ring_size: 48 is no power of two; 64 is"):
        Engine.load("anything", engine_mode="async", dispatch_ring_size=48)
    with pytest.raises(ConfigError, match="dispatch_watermark: engine_mode sync has no rings; set engine_mode: async"):
        Engine.load("anything", dispatch_watermark=0.5)


def test_steps_that_wait_are_cut_and_others_are_not(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[i + 3] for i in range(8)]
    whole = load(engine_mode="async")
    said = [(i, token.id) for i, token in whole.generate_batch(prompts, max_tokens=12)]
    again = [(i, token.id) for i, token in whole.generate_batch(prompts, max_tokens=12)]  # everything is in memory
    assert again == said
    before = whole.counters()["dispatch"]["split_steps"]
    list(whole.generate_batch(prompts, max_tokens=12))
    assert whole.counters()["dispatch"]["split_steps"] == before
    fetch = Reader._fetch

    def slow(*arguments: Any) -> Any:
        time.sleep(0.003)
        return fetch(*arguments)

    monkeypatch.setattr(Reader, "_fetch", slow)
    by_threads(monkeypatch)
    for attention, cut in (("exact", True), ("expert_local", False)):
        engine = load(**SMALL, attention=attention)
        ours = [(i, token.id) for i, token in engine.generate_batch(prompts, max_tokens=12)]
        assert (engine.counters()["dispatch"]["split_steps"] > 0) == cut
        assert ours == said or attention != "exact"
    with pytest.raises(ConfigError, match="dispatch_ring_size: attention expert_local"):
        load(**SMALL, attention="expert_local", dispatch_ring_size=8)


def by_threads(patch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded now read by threads, as where the system has no queue for reads."""
    patch.setattr(QueueTransfer, "open", lambda *arguments: None)


class Fault(RuntimeError):
    """What the tests make a stage die of."""


def inject(engine: Engine, stage: str, patch: pytest.MonkeyPatch) -> Any:
    """Makes one stage fail in its 30th call (the first for stages of a step). Returns the error's type."""
    parts, calls = engine._parts, [0]

    def failing(inner: Any, after: int) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == after:
                raise Fault(stage)
            return inner(*arguments, **more)

        return call

    if stage in ("embed", "attention", "experts", "head"):
        name = {"attention": "attn_router", "experts": "expert_ffn"}.get(stage, stage)
        patch.setattr(
            parts.backend, name, failing(getattr(parts.backend, name), 30 if name[:3] in ("att", "exp") else 1)
        )
    elif stage == "router":
        patch.setattr(parts.transformer._router, "apply", failing(parts.transformer._router.apply, 30))
    elif stage == "place":
        patch.setattr(parts.kv, "place", failing(parts.kv.place, 30))
    elif stage == "dispatch":
        patch.setattr(parts.dispatcher, "split", failing(parts.dispatcher.split, 30))
    elif stage == "ahead":
        (prefetcher,) = parts.ahead._prefetchers.values()
        patch.setattr(prefetcher, "guess", failing(prefetcher.guess, 30))
    elif stage == "read":
        patch.setattr(parts.pager, "request", failing(parts.pager.request, 30))
    else:
        patch.setattr(Reader, "_fetch", failing(Reader._fetch, 30))
    return Fault


class Follow:
    """Foreign router that chooses what softmax would."""

    def select(self, layer: int, logits: Any) -> Any:
        order = (-logits).argsort(axis=1, kind="stable")[:, :2]
        return order, logits.dtype.type(1) / 2 + 0 * order.astype(logits.dtype)


STAGES = ("embed", "attention", "router", "place", "dispatch", "read", "reader", "ahead", "experts", "head")


@pytest.mark.parametrize("rings", [None, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_any_stage(load: Load, stage: str, rings: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends with the stage's name, nothing stays in flight, and the next request says the right tokens."""
    if stage == "reader":  # one that is no stage, but meets what a read does
        by_threads(monkeypatch)
    engine = load(**SMALL, dispatch_ring_size=rings, prefetcher="history", router=Follow())
    expected = ids(engine.generate(PROMPT, max_tokens=6))
    engine.settings.expert_cache_bytes = 2 * 65536 + 65536
    engine.settings.expert_cache_bytes = 16 * 65536  # nothing is in memory that the fault could hide behind
    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        error = inject(engine, stage, patch)
        with pytest.raises(error) as caught:
            list(engine.generate(PROMPT, max_tokens=6))
        if stage in ("embed", "head"):
            assert caught.value.__notes__ == [f"in stage {stage}"]
        else:
            note = caught.value.__notes__[0]
            assert note.startswith(f"in stage {'read' if stage == 'reader' else stage}, layer ") and ", rows " in note
    assert idle(engine) and clean(engine)
    assert ids(engine.generate(PROMPT, max_tokens=6)) == expected and idle(engine)
    assert threads <= set(threading.enumerate())


def test_a_wrong_router_is_named_with_its_stage(load: Load) -> None:
    class Wrong:
        def select(self, layer: int, logits: Any) -> Any:
            return ([[99, 1]], [[1.0, 1.0]]) if layer == 5 else Follow().select(layer, logits)

    engine = load(**SMALL, router=Wrong())
    with pytest.raises(RouterError, match="layer 5") as caught:
        next(engine.generate([3]))
    assert caught.value.__notes__ == ["in stage router, layer 5, rows 0 to 0"] and idle(engine)


def test_a_damaged_page_is_named(model: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(**SMALL)
    expected = ids(engine.generate("The sea", max_tokens=4))
    checksums = engine._parts.file.checksums
    with Engine.load(model, threads=1, engine_mode="async") as other:
        monkeypatch.setattr(other._parts.file, "checksums", lambda layer, e: checksums(layer, e) ^ (layer == 5))
        with pytest.raises(PagerError, match=r"model\.colibri: layer 5 expert \d+: page 0 is damaged") as caught:
            list(other.generate("The sea", max_tokens=4))
        assert caught.value.__notes__[0].startswith("in stage read, layer 5, rows 0 to ")
        assert idle(other) and clean(other)
        monkeypatch.setattr(other._parts.file, "checksums", checksums)
        assert ids(other.generate("The sea", max_tokens=4)) == expected


@pytest.mark.parametrize("rings", [None, 8])
def test_interrupt(load: Load, rings: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while pages are waited for reaches the caller soon; the next generation is right."""
    by_threads(monkeypatch)
    engine = load(**SMALL, dispatch_ring_size=rings)
    expected = ids(engine.generate("The sea", max_tokens=5))
    fetch = Reader._fetch

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return fetch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "_fetch", slow)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            for _ in engine.generate(PROMPT, max_tokens=1000):
                continue
        assert time.monotonic() - begin < 8, "a thousand tokens of pages read one by one take longer than a minute"
        timer.join()
    assert idle(engine) and clean(engine)
    assert ids(engine.generate("The sea", max_tokens=5)) == expected


def test_two_thousand_requests(model: Path) -> None:
    """Short requests, random cancels and changes of budget, policy and batch: no slot, frame, thread or file lost."""
    dice = random.Random(5)
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    how = {"threads": 1, "engine_mode": "async", "dispatch_ring_size": 4, "prefetcher": "history"}
    with Engine.load(model, kv_cache_slot_size=16, kv_cache_max_slots=600, prefill_chunk=8, **how) as engine:
        prompts = [[dice.randrange(3, 3000) for _ in range(dice.randrange(1, 5))] for _ in range(8)]
        right = [ids(engine.generate(prompt, max_tokens=3)) for prompt in prompts]
        live: list[tuple[int, Any, list[int]]] = []
        begun = ended = cancelled = 0
        while begun < 2000 or live:
            while begun < 2000 and len(live) < 8:
                which = dice.randrange(len(prompts))
                live.append((which, engine.generate(prompts[which], max_tokens=dice.randrange(1, 4)), []))
                begun += 1
            entry = dice.choice(live)
            which, stream, got = entry
            chance = dice.random()
            if chance < 0.02:
                engine.settings.expert_cache_bytes = dice.randrange(2, 129) * 65536
            elif chance < 0.03:
                engine.settings.eviction_policy = dice.choice(EVICTION)
            elif chance < 0.04:
                engine.settings.max_batch_size = dice.randrange(1, 9)
            if dice.random() < 0.25:
                stream.close()
                cancelled += 1
                live.remove(entry)
            elif (token := next(stream, None)) is not None:
                got.append(token.id)
            else:
                assert got == right[which][: len(got)] and got
                ended += 1
                live.remove(entry)
        assert ended > 500 < cancelled and idle(engine) and clean(engine)
        assert len(engine._parts.kv._free_seats) == 9
    assert set(threading.enumerate()) == threads and len(os.listdir("/proc/self/fd")) == files
