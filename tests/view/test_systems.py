"""Panels of the systems: columns of counters, words, and what is said where a system is off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.telemetry import Telemetry
from colibri_lab.view.report import PANELS, Figure, figure
from colibri_lab.view.run import RunView
from colibri_lab.view.strips import FIRST_LANE, FIRST_LINE, MOST, Window, said
from colibri_lab.view.systems import SYSTEMS, described
from tests.view.test_report import Wellformed
from tests.view.whole import picture
from tests.widgets.fake import FakeEngine

S = 10**9


def view_of(samples, notes=()):
    telemetry = Telemetry(1, 2, 1)
    for t, counters in samples:
        telemetry.gauges(int(t * S), counters)
    for t, key, value in notes:
        telemetry.note(key, value, int(t * S))
    return RunView.of(telemetry)


def line(window, system, label):
    which = next(i for i, s in enumerate(SYSTEMS) if s.name == system)
    at = next(i for i, found in enumerate(SYSTEMS[which].lines) if found.label == label)
    return window.values[FIRST_LINE[which] + at]


def fact(window, system, label):
    which = next(i for i, s in enumerate(SYSTEMS) if s.name == system)
    at = next(i for i, found in enumerate(SYSTEMS[which].facts) if found.label == label)
    return window.facts(which)[at]


def pager(faults, hits, pins=0, read=0):
    return {"pager": {"faults": faults, "hits": hits, "policy_hits": hits - pins, "pin_hits": pins, "bytes_read": read}}


def test_growth_rates_levels_and_shares():
    router = [{"router": {"selections": s, "certified": c, "candidates": 3 * c}} for s, c in ((0, 0), (10, 8), (10, 8))]
    batch = [{"engine": {"running": r, "steps": 1}} for r in (1, 3, 2)]
    pages = [pager(0, 0), pager(4, 6, 2, 1000), pager(5, 6, 2, 1500)]
    view = view_of([(t, a | b | c) for t, a, b, c in zip((0, 1, 3), router, batch, pages, strict=True)])
    window = Window(view.gauges)
    assert line(window, "pages", "faults").tolist() == [4, 1]
    assert line(window, "pages", "policy hits").tolist() == [4, 0]
    assert line(window, "pages", "pin hits").tolist() == [2, 0]
    assert line(window, "pages", "bytes/s").tolist() == [1000, 250]
    assert line(window, "batch", "running").tolist() == [3, 2]
    np.testing.assert_array_equal(line(window, "router", "by certificate"), [0.8, np.nan])
    np.testing.assert_array_equal(line(window, "router", "candidates"), [3, np.nan])
    assert np.isnan(line(window, "router", "wrong")).all(), "nobody audits"
    assert window.tops[FIRST_LANE[0] : FIRST_LANE[1]].tolist() == [10, 0, 1000], "a lane's top is that of its stack"
    assert window.tops[FIRST_LANE[1]] == 1.0, "shares go to 1"
    assert fact(window, "pages", "faults") == [5, 11]
    assert fact(window, "router", "candidates a row") == [24, 8]
    assert fact(window, "batch", "at most") == [None]


def test_a_counter_that_begins_anew_is_no_growth():
    window = Window(view_of([(0, pager(50, 9)), (1, pager(3, 9)), (2, pager(5, 9))]).gauges)
    assert line(window, "pages", "faults").tolist() == [0, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000))
def test_any_number_of_samples_fits_and_nothing_is_lost(n):
    view = view_of((i / 10, pager(i * i, i)) for i in range(n))
    window, kept = Window(view.gauges), len(view.gauges)
    assert len(window) <= MOST
    assert len(window) >= min(kept - 1, MOST // 2)
    faults = line(window, "pages", "faults")
    series = view.gauges.series("pager.faults") if n else np.zeros(0)
    assert faults.sum() == (series[-1] - series[0] if kept > 1 else 0)
    assert kept < 2 or (int(window.ends_ns[-1]) - window.begin_ns) / S == pytest.approx((kept - 1) / 10)


def test_columns_keep_their_place_while_samples_come():
    telemetry = Telemetry(1, 2, 1)
    view, cursor = RunView(1, 2, 1), telemetry.cursor()
    for i in range(400):
        telemetry.gauges(i * S, pager(i * i, 0))
    view.drain(telemetry, cursor)
    before = Window(view.gauges)
    telemetry.gauges(400 * S, pager(0, 0))
    view.drain(telemetry, cursor)
    after = Window(view.gauges)
    assert before.ends_ns[:-1].tolist() == after.ends_ns[: len(before) - 1].tolist()


def test_bytes_bring_whole_numbers_back():
    counts = np.cumsum(np.random.default_rng(0).integers(0, 100, 40))
    view = view_of((i, pager(int(v), 0)) for i, v in enumerate(counts))
    header, arrays = picture(view)
    at = header["rows"].index(next(i for i, found in enumerate(SYSTEMS[0].lines) if found.label == "faults"))
    top = header["systems"][0]["tops"][0]
    assert np.rint(arrays["sys"][at] / 254 * top).tolist() == np.diff(counts).tolist()
    assert header["systems"][1] == {"on": False, "tops": [0, 0, 0], "facts": []}


def test_notes_and_warnings_stand_where_they_happened():
    samples = [(t, {"engine": {"steps": t + 1, "running": 1}}) for t in range(5)]
    notes = [(0.5, "settings", {"pace": 4}), (2.5, "batch", {"before": 8, "after": 4, "reason": "memory at 87 %"})]
    notes += [(3, "router_warnings", ["layer 3 is <wide>"])]
    view = view_of(samples, notes)
    header, _ = picture(view)
    assert header["marks"] == [[[0, "pace 4"]], [], [], [], [], [[2, "before 8, after 4: memory at 87 %"]]]
    assert header["warnings"] == ["layer 3 is <wide>"]
    panel = PANELS["batch"](view)
    assert "before 8, after 4: memory at 87 %" in panel


@pytest.mark.parametrize(
    ("value", "words"),
    [("x" * 200, "x" * 100), ({"expert_cache_bytes": 2 << 20, "pace": None}, "expert_cache_bytes 2.00 MiB, pace None"),
     ({"reason": "idle"}, "idle"), ([1], "[1]")],
)  # fmt: skip
def test_a_note_in_words(value, words):
    assert said(value) == words


def test_tokens_are_joined_to_the_columns_of_their_time():
    engine = FakeEngine(all_systems=True)
    engine.run(600)
    view = RunView.of(engine.telemetry)
    _, arrays = picture(view)
    window, t = Window(view.gauges), view.timeline.columns["t_ns"][-120:]
    for column, when in zip(arrays["when"].tolist(), t.tolist(), strict=True):
        assert when <= window.ends_ns[column]
        assert column == 0 or when > window.ends_ns[column - 1]


def test_each_panel_alone_and_all_of_them_offline():
    engine = FakeEngine(all_systems=True)
    engine.run(300)
    engine.telemetry.note("router_warnings", ["layer 1: <script>"])
    view = RunView.of(engine.telemetry, engine.describe())
    for name in PANELS:
        page = Figure(view, name)._repr_html_()
        Wellformed(page)
        assert page.count("role='img'") == (name != "text"), name
        assert "http" not in page
    assert "layer 1: &lt;script&gt;" in PANELS["router"](view)
    assert "3.00" in PANELS["router"](view), "candidates a row"
    whole = figure(view)
    assert all(f">{system.title}</b>" in whole for system in SYSTEMS)
    with pytest.raises(ValueError, match="no panel is named routers: there are pages, router"):
        Figure(view, "routers")


def test_what_is_off_says_how_it_is_turned_on():
    engine = FakeEngine()
    engine.run(50)
    view = RunView.of(engine.telemetry)
    for name, words in (("router", "router_audit counts wrong"), ("dispatch", "engine_mode: sync")):
        panel = PANELS[name](view)
        assert words in panel and "<svg" not in panel
    assert "backend: cuda" in PANELS["gpu"](view), "who asks for it hears why it is off"
    shown = [system.title for system in SYSTEMS if f">{system.title}</b>" in figure(view)]
    assert shown == ["Pages", "Router", "KV cache", "Dispatch", "Batch"], "no GPU among the others where there is none"


def test_what_the_board_is_told_is_what_is_drawn():
    told = described()
    assert [len(system["lines"]) for system in told] == [len(system.lines) for system in SYSTEMS]
    for system in told:
        assert {found["lane"] for found in system["lines"]} == set(range(len(system["lanes"])))
        assert {found["draw"] for found in system["lines"]} <= {"stack", "line", "dashes"}
