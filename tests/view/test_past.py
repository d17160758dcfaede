"""The picture at a token of the past is what a fresh view makes of all events up to it; what is kept is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.events import PageKind
from colibri_lab.streams import Streams
from colibri_lab.telemetry import replay
from colibri_lab.trace import STREAMS, save
from colibri_lab.view.frame import prose_block
from colibri_lab.view.past import STOPS, Past
from colibri_lab.view.run import RunView
from tests.view.test_folds import WHOLE, cut
from tests.view.whole import blocks
from tests.widgets.fake import FakeEngine


def empty(engine):
    return RunView(engine.layers, engine.experts, engine.top_k, engine.describe())


def picture(view):
    return *blocks(view), prose_block(view)


def fresh(engine, batches, t_ns):
    """A view of all events up to a moment, and nothing else."""
    view, streams = empty(engine), Streams.of(engine.layers, engine.experts, engine.top_k, batches)
    cursor = streams.cursor()
    while len(batch := streams.read_until(cursor, t_ns)) or batch.dropped:
        view.take(batch)
    return view


def several(tokens=(70, 60, 80), seed=0):
    """(engine, batches as a board reads them, a few tokens each): generations one after the other."""
    engine = FakeEngine(3, 6, slots=64, slot_size=16, seed=seed)
    cursor, t, batches = engine.telemetry.cursor(), 10**9, []
    for n in tokens:
        sequence = engine.start(7, t)
        for position in range(7 + n):
            t += engine.step(sequence, position, int(position >= 7), t) + 50_000
            if position >= 7:
                engine.telemetry.text(sequence, position + 1, f" w{position}")
            if position % 5 == 0:
                batches.append(engine.telemetry.read(cursor))
        engine.finish(sequence, 0, t)
    return engine, [*batches, engine.telemetry.read(cursor)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_seek_is_a_fresh_fold_to_that_token_in_any_batching(data):
    engine, whole = WHOLE
    cuts = {name: data.draw(st.lists(st.integers(0, len(getattr(whole, name))), max_size=6)) for name in STREAMS}
    order = data.draw(st.lists(st.sampled_from(STREAMS), max_size=40))
    past = Past(empty(engine))
    for batch in cut(whole, cuts, order):
        past.add(batch)
    moments = whole.tokens["t_ns"][whole.tokens["token"] >= 0]
    assert past.last == len(moments) - 1
    for token in data.draw(st.lists(st.integers(0, past.last), min_size=1, max_size=5)):
        assert picture(past.at(token)[0]) == picture(fresh(engine, [whole], int(moments[token])))


def test_steps_back_and_forth_over_the_copies_along_the_way():
    engine, batches = several()
    past, whole = Past(empty(engine)), Streams.of(3, 6, 2, batches)
    for batch in batches:
        past.add(batch)
    assert past.last == 209
    for token in (209, 130, 129, 128, 127, 64, 65, 63, 0, 200):
        view, cursor = past.at(token)
        assert picture(view) == picture(fresh(engine, batches, int(whole.moments[token])))
        assert view.timeline.sampled == token + 1
        assert cursor.at["tokens"] == len(view.rows.tokens)
        assert len(past._stops) <= STOPS
    past.rest()
    assert past._stops == {} and past._near is None


def test_what_is_kept_is_bounded_and_said():
    engine, batches = several((300, 300, 300))
    past, live = Past(empty(engine), limit=60_000), empty(engine)
    for batch in batches:
        past.add(batch)
        live.take(batch)
        assert past._bytes <= 60_000
    assert 0 < past.first < past.last == 899
    whole = Streams.of(3, 6, 2, batches)
    for token in (899, past.first + 1, past.first, 800):
        assert picture(past.at(token)[0]) == picture(fresh(engine, batches, int(whole.moments[token])))
    assert past.at(0)[0].timeline.sampled == past.first + 1, "the oldest that is kept"
    assert all(number >= past.first for number, _ in past.marks["starts"])


def test_events_without_any_token_are_bounded_too():
    engine = FakeEngine(3, 6)
    past, cursor = Past(empty(engine), limit=30_000), engine.telemetry.cursor()
    for n in range(40):
        for i in range(100):
            engine.telemetry.page(n * 100 + i + 1, 0, i % 3, i % 6, 1, 1, n)
        past.add(engine.telemetry.read(cursor))
        assert past._bytes <= 30_000, "and so are those of a prompt that never ends"
    with pytest.raises(ValueError, match="nothing to go back to"):
        past.at(0)


def test_a_step_is_the_engine_s_and_tokens_of_one_share_it():
    engine = FakeEngine(2, 4)
    cursor, one = engine.telemetry.cursor(), np.zeros((2, 2, 2), "u2")
    for i in range(5):
        both, slot = np.array([1, 2]), np.zeros((2, 2), "i4")
        engine.telemetry.step(100 + i, both, both * 0 + i, both, 1, 9, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, one, one, slot)
    past = Past(empty(engine))
    past.add(engine.telemetry.read(cursor))
    assert (past.first, past.last) == (0, 9)
    assert [past.beside(n, by) for n, by in ((4, 1), (5, 1), (5, -1), (4, -1), (0, -1), (9, 1), (9, -2))] == [
        7, 7, 3, 3, 1, 9, 5]  # fmt: skip
    assert past.at(4)[0].timeline.sampled == 6


def test_beginnings_and_gaps_are_marked_where_they_were():
    engine, batches = several()
    starts = [batch for batch in batches if len(batch.sequences)]
    assert starts
    batches[-1].missing = {"tokens": 5}
    sampled = sum(int((batch.tokens["token"] >= 0).sum()) for batch in batches[:-1])
    live, recorded = Past(empty(engine)), Past(empty(engine), Streams.of(3, 6, 2, batches))
    for batch in batches:
        live.add(batch)
    assert live.marks == recorded.marks == {"starts": [(0, 1), (70, 2), (130, 3)], "gaps": [(sampled, 5)]}


def test_what_was_read_ahead_is_known_where_a_saved_run_begins(tmp_path):
    engine = FakeEngine(3, 6)
    past, live, cursor = Past(empty(engine), limit=30_000), empty(engine), engine.telemetry.cursor()
    events = [(PageKind.PREFETCH, 0, 1), (PageKind.PREFETCH, 2, 5), (PageKind.PREFETCH, 1, 3), (PageKind.EVICT, 1, 3)]
    events += [(PageKind.FAULT, 1, 0), (PageKind.PIN, 1, 0)]
    for t, (kind, layer, expert) in enumerate(events):
        engine.telemetry.page(t, kind, layer, expert, 1, 0, 0)
    one, beside = np.ones(1, "u4"), (np.zeros((1, 3, 2), "u2"), np.zeros((1, 3, 2), "f2"), np.zeros((1, 3), "i4"))
    for i in range(600):
        engine.telemetry.step(100 + i, one, one * i, one, 1, 9, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, *beside)
        if i == 500:
            engine.telemetry.page(100 + i, PageKind.PREFETCH, 2, 2, 1, 0, 0)
        if i % 10 == 9:
            batch = engine.telemetry.read(cursor)
            past.add(batch)
            live.take(batch)
    assert past.first > 0, "the events of the beginning are no longer kept"
    again = RunView.of(replay(save(past.events(), tmp_path / "run.trace", past.about)))
    assert np.argwhere(live.experts.ahead).tolist() == [[0, 1], [2, 2], [2, 5]]
    for name in ("ahead", "resident", "pinned"):
        np.testing.assert_array_equal(getattr(again.experts, name), getattr(live.experts, name))
