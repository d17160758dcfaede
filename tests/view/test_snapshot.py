"""A snapshot makes a view that began late show what is in memory; what happened later stands."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.events import PageKind, Phase, SlotKind
from colibri_lab.telemetry import Recorder, Telemetry, replay
from colibri_lab.trace import STREAMS
from colibri_lab.view.frame import unpack
from colibri_lab.view.run import RunView
from colibri_lab.widgets.dashboard import connect
from tests.view.test_folds import cut, view_of
from tests.widgets.fake import FakeEngine


def late(tokens=40):
    """(an engine that forgot what it did so far, its clock, its running sequence and position)."""
    engine = FakeEngine(3, 6, slots=64, slot_size=16)
    t = engine.run(60)
    sequence = engine.start(4, t)
    for position in range(tokens):
        t += engine.step(sequence, position, Phase.DECODE, t)
    engine.telemetry = Telemetry(3, 6, 2)
    return engine, t, sequence, tokens


def goes_on(engine, t, sequence, position, more=30):
    for i in range(more):
        t += engine.step(sequence, position + i, Phase.DECODE, t)
    return t


def truth(engine, view):
    """The view shows the engine's own state."""
    assert {tuple(cell) for cell in np.argwhere(view.experts.resident).tolist()} == set(engine.memory)
    owned = {slot: held for held in engine.table.values() for slot in held[2:]}
    assert set(np.flatnonzero(~view.slots.free).tolist()) == set(owned)
    for slot, held in owned.items():
        assert view.slots.fill[slot] == (held[1] if slot == held[0] else engine.slot_size)
    assert view.slots.used == len(owned)


def test_a_view_that_begins_late_shows_what_is_there():
    engine, t, sequence, position = late()
    engine.snapshot(t)
    truth(engine, RunView.of(engine.telemetry, engine.describe()))
    goes_on(engine, t + 1, sequence, position)
    truth(engine, RunView.of(engine.telemetry, engine.describe()))


def test_without_a_snapshot_it_does_not():
    engine, t, sequence, position = late()
    goes_on(engine, t + 1, sequence, position, 1)
    view = RunView.of(engine.telemetry, engine.describe())
    assert int(view.experts.resident.sum()) < len(engine.memory)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_events_before_and_after_it_may_come_in_any_order(data):
    engine = FakeEngine(3, 6, slots=64, slot_size=16)
    cursor, t = engine.telemetry.cursor(), engine.run(20)
    sequence = engine.start(2, t)
    t = goes_on(engine, t, sequence, 0, 25)
    engine.snapshot(t)
    goes_on(engine, t + 1, sequence, 25)
    whole = engine.telemetry.read(cursor)
    cuts = {name: data.draw(st.lists(st.integers(0, len(getattr(whole, name))), max_size=6)) for name in STREAMS}
    order = data.draw(st.lists(st.sampled_from([name for name in STREAMS if name not in ("tokens", "notes")])))
    ours = view_of(
        engine, cut(whole, cuts | {"notes": []}, order)
    )  # notes before the rows after them, as in any source
    theirs = view_of(engine, [whole])
    truth(engine, theirs)
    np.testing.assert_array_equal(ours.experts.resident, theirs.experts.resident)
    np.testing.assert_array_equal(ours.slots.free, theirs.slots.free)
    assert ours.slots.used == theirs.slots.used


def test_pins_and_owners_of_a_snapshot_and_after_it():
    telemetry = Telemetry(2, 4, 2)
    telemetry.page(5, PageKind.PIN, 0, 1, 1, 0, 0)
    telemetry.page(5, PageKind.FAULT, 1, 3, 1, 0, 0)
    telemetry.slot(5, SlotKind.PAIR, 2, 7, 0, 1)
    telemetry.slot(5, SlotKind.ALLOC, 3, 7, 0, 0)
    telemetry.note("snapshot", {"resident": [0, 6], "pinned": [6], "slots": [[2, 7, 0, 1, 3]]}, 10)
    telemetry.page(11, PageKind.EVICT, 0, 0, 1, 0, 0)
    telemetry.note("snapshot", {"slots": [[4, 8, 1, -1, 5]]}, 10)  # the rest of the same one
    view = RunView.of(telemetry, {"kv_slots": 8, "kv_slot_size": 16})
    assert np.flatnonzero(view.experts.resident).tolist() == [6]
    assert np.flatnonzero(view.experts.pinned).tolist() == [6]
    assert np.flatnonzero(~view.slots.free).tolist() == [2, 4]
    assert view.slots.kinds == {"own": 0, "double": 1, "base": 1}
    assert view.slots.fill[[2, 4]].tolist() == [3, 5]


def test_a_board_and_a_recording_that_begin_late(tmp_path):
    engine, *_ = late()
    lab = connect(engine, hz=1)
    truth(engine, lab.view)
    assert unpack(lab.board.frame)[0]["resident"] == len(engine.memory)
    recorder = lab.record(tmp_path / "late.jsonl")
    lab.close()
    truth(engine, RunView.of(replay(recorder.close())))


def test_a_replay_shows_it_when_it_was_taken(tmp_path):
    engine, t, sequence, position = late()
    with Recorder(engine.telemetry, tmp_path / "t.jsonl", engine.describe()) as recorder:
        end = goes_on(engine, t + 1, sequence, position, 1)
        engine.snapshot(end)
        before = RunView.of(engine.telemetry)
    source = replay(recorder.path)
    view, cursor = RunView(3, 6, 2, engine.describe()), source.cursor()
    view.take(source.read_until(cursor, end - 1))
    assert int(view.experts.resident.sum()) < len(engine.memory)
    view.take(source.read_until(cursor, end))
    np.testing.assert_array_equal(view.experts.resident, before.experts.resident)
    truth(engine, view)
