"""The view against the real engine's own counters, with the embedded model."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab
from colibri_lab.bench.ours import listen
from colibri_lab.telemetry import Telemetry
from colibri_lab.view.report import PANELS
from colibri_lab.view.run import RunView
from colibri_lab.view.strips import Window
from colibri_lab.view.systems import SYSTEMS
from colibri_lab.view.timeline import STAGES
from colibri_lab.widgets.dashboard import connect


@pytest.fixture(scope="module")
def engine():
    with colibri_lab.load(colibri_lab.embedded_model(), threads=1, expert_cache_bytes="3MiB") as loaded:
        yield loaded


def test_the_view_says_what_the_engine_counts(engine):
    view, cursor = RunView(8, 16, 2, engine.describe()), engine.telemetry.cursor()
    prompts = ["Mr. Darcy was", "12 + 30 =", "def main"]
    for i, _ in enumerate(engine.generate_batch(prompts, max_tokens=40, temperature=0.7, seed=1)):
        if i == 60:
            engine.settings.expert_cache_bytes = "2MiB"
        if i % 7 == 0:
            view.drain(engine.telemetry, cursor)
    view.drain(engine.telemetry, cursor)
    counters = engine.counters()
    pager, timeline = counters["pager"], view.timeline
    assert (timeline.faults, timeline.hits) == (pager["faults"], pager["hits"])
    assert view.experts.evictions == pager["evictions"]
    assert timeline.bytes_read == pager["bytes_read"]
    assert int(view.experts.resident.sum()) == pager["experts_resident"]
    assert view.slots.used == counters["kv"]["slots_used"] == 0
    assert view.slots.peak == counters["kv"]["slots_peak"]
    assert timeline.decoded == counters["engine"]["decode_tokens"]
    assert timeline.prompt_rows == counters["engine"]["prefill_tokens"]
    assert view.budget_bytes == pager["budget_bytes"] == 2 << 20
    assert view.missing == 0
    np.testing.assert_allclose(view.experts.share.sum(axis=1), 2)
    adds_up(timeline.columns)
    assert timeline.first_token_ms() > 0


def adds_up(columns):
    """A token's stages add up to its time, and little of it is nobody's."""
    decoded = columns[columns["phase"] == 1]
    whole = decoded["latency_ns"].astype("i8") // decoded["rows"]
    known = decoded["stages_ns"].sum(axis=1).astype("i8")
    assert len(decoded) > 30 and (abs(known - whole) <= 0.05 * whole).all()
    named = decoded["stages_ns"][:, :-1].sum(axis=1).astype("i8")
    assert (named <= 1.05 * whole).all(), "no stage counts another's time"
    assert np.median(named / whole) > 0.6
    assert (np.median(decoded["stages_ns"], axis=0) > 0)[[0, 1, 2, 3, 5]].all(), "router and dispatch too"


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """An engine with every system switched on, after a run of four requests with too little memory for its experts."""
    settings = {"engine_mode": "async", "prefetcher": "next_gate", "router": "two_stage", "router_audit": True}
    settings |= {"pin_after_tokens": 4, "kv_cache_persistence_path": tmp_path_factory.mktemp("kv")}
    model, budget = colibri_lab.embedded_model(), "2MiB"
    with colibri_lab.load(model, threads=1, expert_cache_bytes=budget, kv_cache_dtype="fp32", **settings) as loaded:
        for _ in range(2):
            list(loaded.generate_batch(["Mr. Darcy was", "12 + 30 =", "def main", "The"], max_tokens=40))
        yield loaded


def test_the_panels_know_the_engine_s_counters(everything):
    """Every name that a panel asks for is a counter of an engine whose systems are on; each panel says what it says.
    The GPU's are looked at in tests/cuda."""
    view, systems = RunView.of(everything.telemetry, everything.describe()), [s for s in SYSTEMS if s.name != "gpu"]
    asked = {name for system in systems for part in (*system.lines, *system.facts) for name in (*part.of, *part.over)}
    assert asked - {"seconds"} <= set(view.gauges.names)
    counters, window = everything.counters(), Window(view.gauges)
    for system in systems:
        which = SYSTEMS.index(system)
        assert window.on[which], system.name
        assert "<svg" in PANELS[system.name](view)
        for fact, (told, *_) in zip(system.facts, window.facts(which), strict=True):
            names = [name.split(".") for name in fact.of]
            assert told == pytest.approx(sum(counters[group][name] for group, name in names)), fact.label
    columns, pager = view.timeline.columns, counters["pager"]
    assert columns["guessed"].sum() == pager["prefetch_hits"] > 0
    assert 0 < columns["wasted"].sum() <= pager["prefetch_wasted"], "the last token's may come after it"
    assert counters["dispatch"]["units"] > 0 and counters["router"]["certified"] > 0


def test_stages_of_an_asynchronous_step_add_up(everything):
    view = RunView.of(everything.telemetry)
    adds_up(view.timeline.columns)
    waits = view.timeline.columns["stages_ns"][:, STAGES.index("I/O wait")]
    assert waits.sum() > 0, "waiting shows apart"


def test_a_board_that_connects_late_shows_what_is_in_memory(engine):
    old, stream = engine.telemetry, engine.generate("The young lady", max_tokens=200)
    for _ in range(60):
        next(stream)
    listen(engine, Telemetry(8, 16, 2))  # nothing of it is on record
    engine.telemetry = engine._stepper.telemetry
    lab = connect(engine)
    counters = engine.counters()
    assert int(lab.view.experts.resident.sum()) == counters["pager"]["experts_resident"] > 0
    assert lab.view.slots.used == counters["kv"]["slots_used"] > 0
    assert int(lab.view.slots.fill[~lab.view.slots.free].sum()) == counters["kv"]["tokens"]
    for _ in stream:
        pass
    lab.board.tick()
    counters = engine.counters()
    assert int(lab.view.experts.resident.sum()) == counters["pager"]["experts_resident"]
    assert lab.view.slots.used == counters["kv"]["slots_used"] == 0
    lab.close()
    listen(engine, old)
    engine.telemetry = old


def test_pairs_and_base_slots_are_told_apart():
    with colibri_lab.load(colibri_lab.embedded_model(), threads=1, kv_cache_slot_size=16) as engine:
        stream = engine.generate("The young lady", max_tokens=400, temperature=0.8, seed=1)
        for _ in range(300):
            next(stream)
        view, kv = RunView.of(engine.telemetry, engine.describe()), engine.counters()["kv"]
        kinds = view.slots.kinds
        assert sum(kinds.values()) == kv["slots_used"]
        assert 0 < kinds["double"] <= 2 * kv["double_slots"]
        assert kinds["base"] == kv["base_slots"] > 0
        stream.close()


def test_the_board_shows_the_session_s_text_and_prompt(engine, tmp_path):
    lab = connect(engine)
    lab.generate("Once upon a time", max_tokens=60, repetition_penalty=1.1)
    assert lab.wait(60)
    assert lab.error is None
    assert lab.view.prose.text == lab.text
    assert lab.view.prompt == "Once upon a time"
    tokens = lab.session.tokens
    pieces = lab.view.prose.after(-1)
    shown = [token for token in tokens if token.text]
    for token, route in zip(shown, pieces.route, strict=True):
        np.testing.assert_array_equal(token.experts, route)
    list(engine.generate("12 + 30 =", max_tokens=4))
    lab.board.tick()
    assert lab.view.prompt == "", "the text of another request has not this prompt"
    assert lab.report(tmp_path / "r.html").stat().st_size > 20_000
    lab.close()


def test_pace_slows_the_rate_and_not_the_latency(engine):
    lab = connect(engine)
    lab.set("pace", 5)
    lab.generate("Once", max_tokens=12)
    assert lab.wait(60)
    assert 0 < lab.view.timeline.tokens_per_s(10) < 7, "a thousand without it"
    assert lab.view.timeline.latency().p50 < 1000 / 5, "a token waits for its turn outside of its step"
    lab.set("pace", None)
    lab.close()


def test_a_wrong_setting_is_said_and_the_engine_goes_on(engine):
    lab = connect(engine)
    lab.board._handle_custom_msg({"do": "set", "name": "expert_cache_bytes", "value": 5}, [])
    lab.board.tick()
    assert "expert_cache_bytes" in lab.board._said["error"]
    lab.generate("a", max_tokens=3)
    assert lab.wait(30)
    assert lab.error is None
    lab.close()


def test_a_lab_without_telemetry_still_runs():
    with colibri_lab.Lab(colibri_lab.embedded_model(), telemetry=False, threads=1) as lab:
        lab.generate("a", max_tokens=5)
        assert lab.wait(60)
        assert lab.error is None
        assert lab.board._said["made"] == 5
        assert "<svg" in lab.figure()._repr_html_()
