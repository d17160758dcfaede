"""Events that were missed are a gap with their number, whatever the batches, in a trace and in the past too."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.recorded import replay
from colibri_lab.streams import Streams
from colibri_lab.trace import STREAMS, save
from colibri_lab.view.frame import prose_block, unpack
from colibri_lab.view.past import Past
from colibri_lab.view.run import RunView
from tests.view.test_folds import WHOLE, cut
from tests.view.test_past import empty, fresh, picture
from tests.view.whole import blocks


def broken(draw):
    """(batches of WHOLE in some cut and order, with events missing before some; missing by stream; token gaps as
    (rows before it, missed))."""
    _, whole = WHOLE
    cuts = {name: draw(st.lists(st.integers(0, len(getattr(whole, name))), max_size=5)) for name in STREAMS}
    batches = cut(whole, cuts, draw(st.lists(st.sampled_from(STREAMS), max_size=30)))
    missing, gaps, rows = dict.fromkeys(STREAMS, 0), [], 0
    for batch in batches:
        name = next((name for name in STREAMS if len(getattr(batch, name))), None)
        if name and (missed := draw(st.sampled_from((0, 0, 1, 7, 1000)))):
            batch.missing = {name: missed}
            missing[name] += missed
            if name == "tokens":
                gaps.append((rows, missed))
        rows += len(batch.tokens)
    return batches, missing, gaps


def gaps_of(view):
    columns = view.timeline.columns
    at = np.flatnonzero(columns["gap"])
    return [(int(columns["position"][i]), int(columns["sequence"][i]), int(columns["gap"][i])) for i in at]


def expected(gaps):
    """(position, sequence, missed) of the first column after each gap; what no column follows is not shown yet."""
    rows, out = WHOLE[1].tokens, {}
    shown = np.flatnonzero((rows["phase"] == 1) | (rows["token"] >= 0) | (rows["faults"] + rows["hits"] > 0))
    for before, missed in gaps:
        later = shown[shown >= before]
        if len(later):
            out[int(later[0])] = out.get(int(later[0]), 0) + missed
    return [(int(rows["position"][i]), int(rows["sequence"][i]), missed) for i, missed in out.items()]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_gap_is_where_it_was_with_its_number(data):
    engine, (batches, missing, gaps) = WHOLE[0], broken(data.draw)
    view, past = empty(engine), Past(empty(engine))
    for batch in batches:
        view.take(batch)
        past.add(batch)
    assert gaps_of(view) == expected(gaps)
    header, arrays = unpack(picture(view)[-2])
    told = [missed for *_, missed in expected(gaps)]
    assert header["gaps"] == told[len(told) - int((arrays["flag"] & 2 > 0).sum()) :], "those of the columns drawn"
    told = view.timeline.missing, view.experts.missing, view.slots.missing, view.prose.missing, view.gauges.missing
    assert told == tuple(missing[name] for name in ("tokens", "pages", "slots", "texts", "gauges"))
    assert view.missing == sum(missing.values())
    sampled = np.concatenate([[0], np.cumsum(WHOLE[1].tokens["token"] >= 0)])
    assert past.marks["gaps"] == [(int(sampled[before]), missed) for before, missed in gaps]
    assert gaps_of(past.at(past.last)[0]) == gaps_of(view)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_trace_of_it_gives_the_live_arrays_at_every_token(tmp_path, data):
    engine, (batches, missing, _) = WHOLE[0], broken(data.draw)
    live = empty(engine)
    for batch in batches:
        live.take(batch)
    source = replay(save(Streams.of(3, 6, 2, batches), tmp_path / "run.trace", engine.describe()))
    again = RunView.of(source)
    assert source.counters()["dropped"] == sum(missing.values())
    assert blocks(again) == blocks(live)
    assert prose_block(again) == prose_block(live)
    past, moments = Past(empty(engine), source), source.moments
    for token in data.draw(st.lists(st.integers(0, past.last), max_size=3)):
        assert picture(past.at(token)[0]) == picture(fresh(engine, batches, int(moments[token])))
