"""The worker thread for the lab: returns at once, pauses, resumes, stops, and takes settings while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from colibri_lab.errors import RequestError

from .conftest import Load


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def test_start_returns_at_once_and_the_text_is_right(load: Load) -> None:
    engine = load()
    expected = list(engine.generate("The sea", max_tokens=60))
    session = engine.session()
    assert session.state == "idle"
    engine.settings.pace = 10
    session.start("The sea", max_tokens=60)
    assert session.state == "generating" and len(session.tokens) < 60, "at this pace all of it would take 6 s"
    engine.settings.pace = None
    assert session.join(60) and session.state == "idle" and session.error is None
    assert [t.id for t in session.tokens] == [t.id for t in expected] and session.text == "".join(
        t.text for t in expected
    )
    assert session.text[:10] in session._repr_html_()
    session.close()


def test_pause_resume_stop(load: Load) -> None:
    engine = load(pace=200)
    expected = [t.id for t in engine.generate("The sea", max_tokens=30)]
    session = engine.session()
    session.start("The sea", max_tokens=30)
    until(lambda: len(session.tokens) >= 3)
    session.pause()
    assert session.state == "paused"
    time.sleep(0.02)
    held = len(session.tokens)
    time.sleep(0.1)
    assert len(session.tokens) == held and not session.join(0.01)
    session.resume()
    assert session.join(20) and [t.id for t in session.tokens] == expected
    session.start("The sea", max_tokens=900)
    until(lambda: len(session.tokens) >= 3)
    session.pause()
    session.stop()
    assert session.join(5) and session.state == "idle" and 3 <= len(session.tokens) < 900
    assert engine.counters()["kv"]["slots_used"] == 0
    session.close()


def test_slow_pace_does_not_hold_up_pause_and_stop(load: Load) -> None:
    session = load(pace=0.01).session()
    session.start("The sea", max_tokens=30)
    until(lambda: len(session.tokens) == 1)
    session.stop()
    assert session.join(50), "the next token would have come after 100 s"
    session.close()


def test_stop_ends_a_long_prompt_at_its_next_chunk(load: Load) -> None:
    engine = load(prefill_chunk=1)
    steps = lambda: engine.counters()["engine"]["steps"]  # noqa: E731
    session = engine.session()
    session.start([5] * 900, max_tokens=3)
    until(lambda: steps() >= 3)
    session.stop()
    assert session.join(5) and session.state == "idle" and not session.tokens
    assert steps() < 450 and engine.counters()["kv"]["slots_used"] == 0
    session.close()


def test_starting_again_replaces_what_runs(load: Load) -> None:
    engine = load()
    expected = [t.id for t in engine.generate("A", max_tokens=5)]
    session = engine.session()
    session.start("The sea", max_tokens=900)
    session.start("A", max_tokens=5)
    session.join(10)
    assert [t.id for t in session.tokens] == expected
    session.close()


def test_threads_that_start_at_once_leave_one_generation(load: Load) -> None:
    engine = load(pace=1000)
    session = engine.session()
    starters = [threading.Thread(target=session.start, args=("The sea", 900)) for _ in range(8)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(10)
    running = [thread for thread in threading.enumerate() if thread.name == "colibri-session"]
    assert len(running) == 1 and session.state == "generating"
    session.start("A", max_tokens=5)
    assert session.join(10) and len(session.tokens) == 5
    session.close()


def test_settings_while_it_runs(load: Load) -> None:
    engine = load(pace=300)
    session = engine.session()
    session.start("The sea", max_tokens=900)
    until(lambda: len(session.tokens) >= 2)
    session.set("expert_cache_bytes", "512KiB")
    until(lambda: engine.counters()["pager"]["frames"] == 8, 1.0)
    session.set("expert_cache_bytes", "6MiB")
    until(lambda: engine.counters()["pager"]["frames"] == 96, 1.0)
    session.close()
    assert session.state == "idle"


def test_errors_wait_for_who_looks(load: Load) -> None:
    engine = load(kv_cache_max_slots=40, kv_cache_slot_size=2)
    session = engine.session()
    with pytest.raises(RequestError):
        session.start("A", temperature=-1)
    session.start("The sea", max_tokens=200)
    session.join(20)
    assert session.state == "error" and "kv_cache_max_slots" in str(session.error) and session.tokens
    session.start("A", max_tokens=2)
    session.join(20)
    assert session.state == "idle" and session.error is None
    session.close()


def test_closing_the_engine_ends_its_sessions(load: Load) -> None:
    before = threading.active_count()
    engine = load(pace=100)
    sessions = [engine.session(), engine.session()]
    for session in sessions:
        session.start("The sea", max_tokens=900)
    engine.close()
    assert [s.state for s in sessions] == ["idle", "idle"] and threading.active_count() == before
