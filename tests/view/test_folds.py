"""Views are folds: any batching and interleaving of the same events gives the same arrays; what is missing is shown."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.events import NO_EXPERT, Phase, SequenceKind, SlotKind
from colibri_lab.telemetry import Recorder, Telemetry, replay
from colibri_lab.trace import STREAMS, Batch
from colibri_lab.view.experts import ExpertView
from colibri_lab.view.frame import prose_block
from colibri_lab.view.history import History
from colibri_lab.view.run import RunView
from tests.view.whole import blocks
from tests.widgets.fake import FakeEngine


def made(seed=0, tokens=120, layers=3, experts=6):
    """(engine, all of its events as one batch): two generations, the second still running."""
    engine = FakeEngine(layers, experts, slots=64, slot_size=16, seed=seed)
    cursor = engine.telemetry.cursor()
    t = engine.run(tokens)
    sequence = engine.start(4, t)
    for position in range(30):
        t += engine.step(sequence, position, Phase.PREFILL if position < 4 else Phase.DECODE, t)
        if position >= 4:
            engine.telemetry.text(sequence, position + 1, f" w{position}")
    return engine, engine.telemetry.read(cursor)


WHOLE = made()


def view_of(engine, batches):
    view = RunView(engine.layers, engine.experts, engine.top_k, engine.describe())
    for batch in batches:
        view.take(batch)
    return view


def cut(batch: Batch, cuts: dict[str, list[int]], order: list[str]) -> list[Batch]:
    """One small batch for each piece of each stream, streams in the order given."""
    arrays = {name: [name] for name in STREAMS} | {"tokens": ["tokens", "route", "weight", "slot"]}
    left = {name: [0, *sorted(cuts[name]), len(getattr(batch, name))] for name in STREAMS}
    empty = {f: getattr(batch, f)[:0] for names in arrays.values() for f in names}
    pieces = []
    for name in order:
        if len(left[name]) > 1:
            start, end = left[name][0], left[name][1]
            del left[name][0]
            part = {f: copy.copy(getattr(batch, f)[start:end]) for f in arrays[name]}
            pieces.append(Batch(**{**empty, **part}, names=batch.names))
    for name in STREAMS:
        for start, end in zip(left[name], left[name][1:], strict=False):
            pieces.append(
                Batch(**{**empty, **{f: getattr(batch, f)[start:end] for f in arrays[name]}}, names=batch.names)
            )
    return pieces


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_batching_and_interleaving_gives_the_same_picture(data):
    engine, whole = WHOLE
    cuts = {name: data.draw(st.lists(st.integers(0, len(getattr(whole, name))), max_size=6)) for name in STREAMS}
    order = data.draw(st.lists(st.sampled_from(STREAMS), max_size=40))
    ours, theirs = view_of(engine, cut(whole, cuts, order)), view_of(engine, [whole])
    assert blocks(ours) == blocks(theirs)
    assert prose_block(ours) == prose_block(theirs)
    for name in ("share", "resident", "faults", "last_fault_ns"):
        np.testing.assert_array_equal(getattr(ours.experts, name), getattr(theirs.experts, name))
    for name in ("sequence", "layer", "owner", "free", "fill"):
        np.testing.assert_array_equal(getattr(ours.slots, name), getattr(theirs.slots, name))
    np.testing.assert_array_equal(ours.timeline.columns, theirs.timeline.columns)
    for name in theirs.gauges.names:
        np.testing.assert_array_equal(ours.gauges.rate(name), theirs.gauges.rate(name))
    assert ours.timeline.first_token_ms() == theirs.timeline.first_token_ms()


def test_a_replayed_trace_gives_the_live_picture(tmp_path):
    engine = FakeEngine(3, 6, slots=64)
    live, cursor = RunView(3, 6, 2, engine.describe()), engine.telemetry.cursor()
    recorder, t = Recorder(engine.telemetry, tmp_path / "t.jsonl", engine.describe()), 10**9
    for _ in range(4):
        t = engine.run(25, t_ns=t)
        live.drain(engine.telemetry, cursor)
    again = RunView.of(replay(recorder.close()))
    assert blocks(again) == blocks(live)


def test_the_engine_s_own_state_is_seen():
    engine, whole = made(seed=3)
    view = view_of(engine, [whole])
    assert {tuple(cell) for cell in np.argwhere(view.experts.resident).tolist()} == set(engine.memory)
    assert view.slots.used == engine.slots - len(engine.free)
    held = {slots[0]: slots[1] for slots in engine.table.values()}
    for slot, filled in held.items():
        assert view.slots.fill[slot] == (filled - 1) % engine.slot_size + 1
    assert (view.timeline.faults, view.timeline.hits) == (engine.total["faults"], engine.total["hits"])
    assert view.timeline.evictions == view.experts.evictions == engine.total["evictions"]
    np.testing.assert_allclose(view.experts.share.sum(axis=1), engine.top_k)
    last = whole.route[-view.experts.window :]
    assert view.experts.share[1, 2] == (last[:, 1] == 2).any(axis=1).mean()


def test_the_window_can_be_changed_at_any_time():
    engine, whole = WHOLE
    small, large = view_of(engine, [whole]).experts, ExpertView(3, 6, 2, window=9)
    small.window = 9
    large.take(whole)
    np.testing.assert_array_equal(small.share, large.share)
    small.window = 10**6
    assert small.window == 1024


def test_dense_layers_and_strange_numbers_do_not_hurt():
    view = ExpertView(2, 4, 2)
    telemetry = Telemetry(2, 4, 2)
    cursor, one = telemetry.cursor(), np.ones(1, "u4")
    route = np.array([[[NO_EXPERT, NO_EXPERT], [1, 200]]], "u2")
    slot = np.full((1, 2), -1, "i4")
    telemetry.step(1, one, one, one, 1, 9, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, route, np.zeros((1, 2, 2)), slot)
    telemetry.page(1, 0, 7, 900, 1, 0, 0)
    batch = telemetry.read(cursor)
    view.take(batch)
    assert view.share.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    run = RunView(2, 4, 2)
    run.take(batch)
    assert run.slots.used == 0


def test_missed_rows_are_a_gap_with_their_number():
    engine, whole = WHOLE
    view = RunView(3, 6, 2, engine.describe())
    first, rest = cut(whole, {name: [20] if name == "tokens" else [] for name in STREAMS}, ["tokens"])[0], None
    view.take(first)
    rest = cut(whole, {name: [30] if name == "tokens" else [] for name in STREAMS}, [])
    for batch in rest:
        if len(batch.tokens) == 30:
            continue
        if len(batch.tokens):
            batch.missing = {"tokens": 10}
        view.take(batch)
    gaps = view.timeline.columns["gap"]
    assert gaps[gaps > 0].tolist() == [10]
    assert view.missing == view.timeline.missing == 10
    assert view.timeline.columns["position"][gaps > 0].tolist() == [30]


def test_time_adds_up_and_prompt_rows_are_told_apart():
    telemetry, one = Telemetry(1, 2, 1), np.ones(1, "u4")
    telemetry.sequence(1_000_000, SequenceKind.START, 1, 3)
    route, weight, slot = np.zeros((3, 1, 1), "u2"), np.ones((3, 1, 1), "f2"), np.zeros((3, 1), "i4")
    rows = np.arange(3)
    counts, ids = (1, 0, 0, 8), np.array([-1, -1, 4])
    telemetry.step(
        5_000_000, np.ones(3), rows, ids, 0, 3_000_000, 900, 90, 60, 300, 600, 90, *counts, route, weight, slot
    )
    for i in range(4):
        stages, beside = (400_000, 20_000, 30_000, 100_000, 300_000, 50_000), (route[:1], weight[:1], slot[:1])
        t = 6_000_000 + i * 1_000_000
        telemetry.step(t, one, one * (3 + i), one, 1, 1_000_000, *stages, 0, 1, 0, 0, *beside)
    view = RunView.of(telemetry)
    columns = view.timeline.columns
    assert columns["phase"].tolist() == [0, 1, 1, 1, 1], "one column for the prompt's step"
    assert columns["stages_ns"][1].tolist() == [300_000, 400_000, 20_000, 30_000, 100_000, 50_000, 100_000]
    assert columns["stages_ns"].sum(axis=1)[1:].tolist() == [1_000_000] * 4
    assert sum(view.timeline.shares().values()) == pytest.approx(1) and RunView(1, 2, 1).timeline.shares() == {}
    assert view.timeline.latency()[:2] == (4, 1.0)
    assert view.timeline.first_token_ms() == 4.0
    assert view.timeline.prompt_tokens == 3
    assert view.timeline.prompt_rows / (view.timeline.prompt_ns / 1e9) == pytest.approx(1000)
    assert view.timeline.tokens_per_s(2.5) == pytest.approx(1000, rel=0.01)
    assert view.timeline.hit_rate() == 0.8
    counts, end = view.timeline.histogram(10)
    assert counts.sum() == 4
    assert end == 1.5


def test_rows_of_one_step_share_its_time():
    telemetry, rows = Telemetry(1, 2, 1), np.arange(2)
    route, slot = np.zeros((2, 1, 1), "u2"), np.zeros((2, 1), "i4")
    telemetry.step(9, rows, rows, rows, 1, 1_000, 400, 20, 20, 160, 200, 100, 0, 1, 0, 0, route, route, slot)
    columns = RunView.of(telemetry).timeline.columns
    assert columns["stages_ns"].sum(axis=1).tolist() == [500, 500]
    assert columns["latency_ns"].tolist() == [1000, 1000], "each of them waited for the whole step"


def test_a_slot_that_changes_hands():
    telemetry, one = Telemetry(1, 2, 1), np.ones(1, "u4")
    route, slot = np.zeros((1, 1, 1), "u2"), np.full((1, 1), 3, "i4")

    def row(sequence, position):
        telemetry.step(1, one * sequence, one * position, one, 1, 9, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, route, route, slot)

    telemetry.slot(1, SlotKind.ALLOC, 3, 2, 0, 1)
    row(2, 0)
    row(2, 1)
    telemetry.slot(2, SlotKind.FREE, 3, 2, 0, 1)
    view = RunView.of(telemetry)
    assert (view.slots.used, view.slots.peak, view.slots.fill[3], view.slots.free[3]) == (0, 1, 2, True)
    telemetry.slot(3, SlotKind.ALLOC, 3, 1, 0, -1)
    row(1, 5)
    view = RunView.of(telemetry)
    assert (view.slots.used, view.slots.fill[3], view.slots.owner[3]) == (1, 1, -1)


def test_text_follows_the_newest_sequence():
    telemetry = Telemetry(1, 2, 1)
    for sequence, position, piece in ((1, 4, "old"), (2, 9, " b"), (1, 5, "late"), (2, 8, "a"), (2, 12, "\n€")):
        telemetry.text(sequence, position, piece)
    prose = RunView.of(telemetry).prose
    assert (prose.sequence, prose.text) == (2, "a b\n€")
    assert prose.after(8).position == [9, 12]
    assert (prose.before(9), prose.before(8)) == (8, -1)
    assert (prose.after(-1).route == NO_EXPERT).all(), "no row is known for it"


@given(st.lists(st.integers(0, 12), max_size=40))
def test_history_is_the_end_of_the_stream(sizes):
    history, all_rows = History(5, "i8"), []
    for n in sizes:
        rows = np.arange(len(all_rows), len(all_rows) + n)
        history.append(rows)
        all_rows += rows.tolist()
        assert history.rows.tolist() == all_rows[-5:]
    assert history.total == len(all_rows)


def test_long_runs_keep_little():
    engine = FakeEngine(2, 4, slots=64)
    view, cursor, t = RunView(2, 4, 2, engine.describe()), engine.telemetry.cursor(), 10**9
    for _ in range(12):
        t = engine.run(400, t_ns=t)
        view.drain(engine.telemetry, cursor)
    assert len(view.timeline.columns) == 2048
    assert len(view.rows.tokens) == 2048
    assert len(view.prose._pieces) <= 2048
    assert view.timeline.decoded == 4800
