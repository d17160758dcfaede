"""What stops one request stops no other, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.engine import Engine
from colibri_lab.errors import PagerError, RequestError, SlotsExhausted
from colibri_lab.ops.types import NonFiniteLogits

from .conftest import Load


def ids(tokens: Any) -> list[int]:
    return [token.id for token in tokens]


def clean(engine: Engine) -> bool:
    """Nothing is held by anybody."""
    kv, e = engine.counters()["kv"], engine.counters()["engine"]
    batcher = engine._stepper.batcher
    idle = not batcher.running and not batcher.waiting and not batcher.incoming
    return idle and kv["slots_used"] == 0 == kv["tokens"] and e["sequences_started"] == e["sequences_finished"]


class Wrapped:
    """A backend that does something before one of its calls."""

    def __init__(self, engine: Engine, name: str, before: Any) -> None:
        self._inner, self._name, self._before = engine._parts.backend, name, before
        engine._stepper.transformer.backend = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name != self._name:
            return call

        def first(*arguments: Any) -> Any:
            self._before(*arguments)
            return call(*arguments)

        return first


def test_router_logits_that_are_not_finite_stop_one_request(load: Load) -> None:
    engine = load(prefill_chunk=8)
    rows = engine._parts.rows
    good = ids(engine.generate([5, 6, 7], max_tokens=6))

    def fail(layer: int, n: int) -> None:
        for row in range(n):
            if layer == 3 and rows.token[row] == 2500:
                raise NonFiniteLogits(layer, row)

    Wrapped(engine, "attn_router", fail)
    got: dict[int, list[int]] = {0: [], 2: []}
    with pytest.raises(RequestError, match=r"layer 3 are not finite at position 12 \(token id 2500\)"):
        for i, token in engine.generate_batch([[5, 6, 7], [*range(12), 2500], [5, 6, 7]], max_tokens=6):
            got[i].append(token.id)
    assert got == {0: good, 2: good} and clean(engine)
    with pytest.raises(RequestError, match="position 1 "):
        engine.logits([1, 2500])
    assert clean(engine) and ids(engine.generate([5, 6, 7], max_tokens=6)) == good


def test_logits_that_are_not_finite_stop_one_request(load: Load) -> None:
    engine = load()
    rows = engine._parts.rows
    good = ids(engine.generate("A", max_tokens=4))
    head = engine._parts.backend.head

    class Bad:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine._parts.backend, name)

        def head(self, n: int) -> None:
            head(n)
            rows.logits[:n] = float("nan")
            rows.logsumexp[:n] = float("nan")

    engine._stepper.transformer.backend = Bad()  # type: ignore[assignment]
    with pytest.raises(RequestError, match="logits are not finite at position"):
        next(engine.generate("A"))
    engine._stepper.transformer.backend = engine._parts.backend
    assert clean(engine) and ids(engine.generate("A", max_tokens=4)) == good


def test_no_slot_left_stops_one_request(load: Load) -> None:
    engine = load(kv_cache_max_slots=30, kv_cache_slot_size=8)
    small = ids(engine.generate([1], max_tokens=3))
    got: list[int] = []
    with pytest.raises(
        SlotsExhausted,
        match=r"all 30 slots of 8 tokens are in use, \d+ of them by this request; raise kv_cache_max_slots",
    ):
        for i, token in engine.generate_batch([[1], list(range(100))], max_tokens=3):
            assert i == 0
            got.append(token.id)
    assert got == small and clean(engine)
    with pytest.raises(SlotsExhausted):
        engine.logits(list(range(60)))
    assert clean(engine) and ids(engine.generate([1], max_tokens=3)) == small


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(16, 120))
def test_any_mix_of_requests_leaves_nothing_behind(model: Path, seed: int, slots: int) -> None:
    """Random prompts, lengths, cancels and full pools: whoever ends well has the right tokens, and all comes back."""
    dice = random.Random(seed)
    with Engine.load(
        model, threads=1, kv_cache_max_slots=slots, kv_cache_slot_size=4, max_batch_size=3, prefill_chunk=6
    ) as engine:
        live: list[tuple[list[int], Any, list[int]]] = []
        done: list[tuple[list[int], list[int]]] = []
        for _ in range(25):
            if len(live) < 5 and dice.random() < 0.5:
                prompt = [dice.randrange(3, 3000) for _ in range(dice.randrange(1, 15))]
                live.append((prompt, engine.generate(prompt, max_tokens=dice.randrange(1, 8)), []))
            if not live:
                continue
            entry = dice.choice(live)
            prompt, tokens, got = entry
            if dice.random() < 0.1:
                tokens.close()
                live.remove(entry)
                continue
            try:
                token = next(tokens, None)
            except SlotsExhausted:
                live.remove(entry)
            else:
                if token is None:
                    live.remove(entry)
                    done.append((prompt, got))
                else:
                    got.append(token.id)
        for _, tokens, _ in live:
            tokens.close()
        assert clean(engine)
    with Engine.load(model, threads=1) as engine:
        for prompt, got in done:
            assert ids(engine.generate(prompt, max_tokens=len(got))) == got


def test_damaged_pages_are_named_and_the_engine_lives(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(model, folder)
    with Engine.load(model, threads=1) as engine:
        expected = ids(engine.generate("The sea", max_tokens=4))
        layer, expert = 5, int(next(engine.generate("The sea")).experts[5, 0])
        offset, _ = engine._parts.file.extent(layer, expert)
    with (folder / "model.colibri").open("r+b") as file:
        file.seek(offset + 99)
        byte = file.read(1)
        file.seek(offset + 99)
        file.write(bytes([byte[0] ^ 8]))
    with Engine.load(folder, threads=1) as engine:
        with pytest.raises(PagerError, match=rf"model\.colibri: layer {layer} expert {expert}: page 0 is damaged"):
            list(engine.generate("The sea", max_tokens=4))
        assert clean(engine)
        with (folder / "model.colibri").open("r+b") as file:
            file.seek(offset + 99)
            file.write(byte)
        assert ids(engine.generate("The sea", max_tokens=4)) == expected


@pytest.mark.parametrize(("name", "layer"), [("attn_router", 0), ("attn_router", 5), ("expert_ffn", 7), ("head", 0)])
def test_an_error_in_a_step_is_undone(load: Load, name: str, layer: int) -> None:
    """Whatever a step dies of, the other requests in it go on as if it had not been."""
    engine = load()
    expected = ids(engine.generate("The sea", max_tokens=8))
    armed = [False]

    def fail(first: int, *rest: int) -> None:
        if armed[0] and (name == "head" or first == layer):
            raise MemoryError

    Wrapped(engine, name, fail)
    other = engine.generate("The sea", max_tokens=8)
    got = [next(other).id]
    while len(got) < 8:
        armed[0] = True
        with pytest.raises(MemoryError):
            next(engine.generate([4, 5], max_tokens=1))  # shares its step with the other
        armed[0] = False
        got.append(next(other).id)
    other.close()
    assert got == expected and clean(engine)


@pytest.mark.parametrize("when", ["decode", "prefill", "twice"])
def test_interrupt(load: Load, when: str) -> None:
    """SIGINT in the main thread reaches the caller soon, and the next generation is right."""
    engine = load(prefill_chunk=64)
    expected = ids(engine.generate("The sea", max_tokens=5))
    before = set(threading.enumerate())
    slow = Wrapped(engine, "attn_router", lambda layer, n: time.sleep(0.004))
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    again = threading.Timer(0.16, os.kill, (os.getpid(), signal.SIGINT))
    got, begin = [], time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            for token in engine.generate([7] * (900 if when == "prefill" else 3), max_tokens=1000):
                got.append(token.id)
        finally:
            if when == "twice":
                again.start()
                again.join()
                time.sleep(0.05)
    assert time.monotonic() - begin < 8, "a thousand tokens would take 32 s at least"
    timer.join()
    assert (not got) == (when == "prefill")
    engine._stepper.transformer.backend = slow._inner
    assert clean(engine) and ids(engine.generate("The sea", max_tokens=5)) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    other: list[list[int]] = []
    thread = threading.Thread(target=lambda: other.append(ids(engine.generate("The sea", max_tokens=5))))
    thread.start()
    thread.join(10)
    assert other == [expected] and set(threading.enumerate()) == before


def test_somebody_elses_handler_is_respected(load: Load) -> None:
    """A handler that does not raise (asyncio's, say) is called, and the generation goes on with the right tokens."""
    engine = load()
    expected = ids(engine.generate("The sea", max_tokens=40))
    Wrapped(engine, "attn_router", lambda layer, n: time.sleep(0.0005))
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        timers = [threading.Timer(0.02 * i, os.kill, (os.getpid(), signal.SIGINT)) for i in range(1, 4)]
        for timer in timers:
            timer.start()
        assert ids(engine.generate("The sea", max_tokens=40)) == expected
        for timer in timers:
            timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) >= 1 and clean(engine)


STORM = """
import os, random, signal, sys, threading, time
from colibri_lab.engine import Engine

dice, stop = random.Random(1), threading.Event()

def storm():
    stop.wait(0.1)  # the main thread may still be inside thread.start()
    while not stop.wait(dice.random() * 0.02):
        os.kill(os.getpid(), signal.SIGINT)

with Engine.load(sys.argv[1], threads=1, expert_cache_bytes="1MiB", prefill_chunk=16) as engine:
    ids = [1, *range(50, 90)]
    tokens = [t.id for t in engine.generate(ids, max_tokens=20)]
    logits = engine.logits(ids)
    thread = threading.Thread(target=storm, daemon=True)
    struck = 0
    thread.start()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            assert [t.id for t in engine.generate(ids, max_tokens=20)] == tokens
            assert (engine.logits(ids) == logits).all()
        except KeyboardInterrupt:
            struck += 1
    while thread.is_alive():
        try:
            stop.set()
            thread.join()
        except KeyboardInterrupt:
            pass
    assert [t.id for t in engine.generate(ids, max_tokens=20)] == tokens
    assert (engine.logits(ids) == logits).all()
    counters = engine.counters()
    assert counters["kv"]["slots_used"] == 0
    assert counters["engine"]["sequences_started"] == counters["engine"]["sequences_finished"]
    assert len(engine._parts.kv._free_seats) == 9 and not engine._turn.taken()
    print(struck)
"""


def test_a_storm_of_interrupts(model: Path) -> None:
    """At random moments, hundreds of times: no lock stays held, no seat or slot is lost, every result is right."""
    done = subprocess.run([sys.executable, "-c", STORM, str(model)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
