"""Kept runs: the same record from any batching and from a replay; tables and comparisons say what was measured."""

from __future__ import annotations

import csv
import dataclasses
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import NotAvailable
from colibri_lab.events import Phase
from colibri_lab.telemetry import Recorder, replay
from colibri_lab.trace import STREAMS
from colibri_lab.view.kept import FIGURES, Comparison, Runs
from colibri_lab.view.run import RunView
from tests.view.test_folds import cut, view_of
from tests.widgets.fake import FakeEngine


def two_runs(seed=0):
    """(engine, all of its events): a run of 50 tokens, then one of 40 with another pace."""
    engine = FakeEngine(3, 6, slots=64, slot_size=16, seed=seed, all_systems=True)
    cursor = engine.telemetry.cursor()
    t = engine.run(50)
    engine.telemetry.note("settings", {"pace": 30.0}, t)
    engine.telemetry.note("prompt", {"sequence": 2, "text": "Hello", "sampling": {"seed": 3}}, t + 1)
    engine.run(40, t_ns=t + 10)
    return engine, engine.telemetry.read(cursor)


WHOLE = two_runs()


def test_a_record_says_what_the_events_say():
    engine, whole = WHOLE
    run = view_of(engine, [whole]).keep("A")
    rows = whole.tokens[whole.tokens["sequence"] == 2]
    decode = rows[rows["phase"] == Phase.DECODE]
    assert (run.tokens, run.prompt_tokens, run.sequences) == (40, 7, 1)
    assert run.settings == {"pace": 30.0} and run.changed == ()
    assert (run.prompt, run.sampling) == ("Hello", {"seed": 3})
    assert run.p95_ms == np.percentile(decode["latency_ns"] / 1e6, 95)
    sampled = rows["t_ns"][rows["token"] >= 0].astype("i8")
    assert run.tokens_per_s == pytest.approx(39e9 / (sampled[-1] - sampled[0]))
    assert run.ttft_ms == pytest.approx((sampled[0] - int(whole.sequences["t_ns"][-2])) / 1e6)
    assert run.hit_rate == rows["hits"].sum() / (rows["hits"].sum() + rows["faults"].sum())
    assert run.bytes_read == rows["bytes_read"].sum()
    kinds = (run.policy_hit_rate, run.pin_hit_rate, run.prefetch_hit_rate)
    assert sum(kinds) == pytest.approx(run.hit_rate, abs=0.03)  # the sample before the run is of the step before
    assert run.text == "".join(piece for sequence, _, piece in whole.texts if sequence == 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.tokens = 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_batching_gives_the_same_record(data):
    engine, whole = WHOLE
    cuts = {name: data.draw(st.lists(st.integers(0, len(getattr(whole, name))), max_size=6)) for name in STREAMS}
    order = data.draw(st.lists(st.sampled_from(STREAMS), max_size=40))
    assert view_of(engine, cut(whole, cuts, order)).keep("A") == view_of(engine, [whole]).keep("A")


def test_a_replayed_trace_gives_the_same_record(tmp_path):
    engine = FakeEngine(3, 6, slots=64, slot_size=16, all_systems=True)
    with Recorder(engine.telemetry, tmp_path / "trace.jsonl", engine.describe()):
        end = engine.run(30)
        engine.run(50, t_ns=end)
    live = RunView.of(engine.telemetry, engine.describe()).keep("A")
    source = replay(tmp_path / "trace.jsonl")
    assert RunView.of(source, source.engine).keep("A") == live


def test_overlapping_sequences_are_one_run():
    engine = FakeEngine(2, 4, slots=64, slot_size=16)
    first, second = engine.start(1, 100), engine.start(1, 200)
    for position in range(6):
        for sequence in (first, second):
            engine.step(sequence, position, int(position > 0), 10**6 * (1 + position))
    run = RunView.of(engine.telemetry, engine.describe()).keep("both")
    assert (run.sequences, run.tokens, run.prompt_tokens) == (2, 10, 2)


def test_settings_written_while_it_ran_are_named():
    engine = FakeEngine(2, 4, slots=64, slot_size=16)
    sequence = engine.start(1, 100)
    for position in range(4):
        engine.step(sequence, position, int(position > 0), 10**6 * (1 + position))
    engine.telemetry.note("settings", {"pace": 9.0}, 2 * 10**6)
    engine.telemetry.note("settings", {"pace": None, "prefill_chunk": 7}, 10**9)
    run = RunView.of(engine.telemetry, engine.describe()).keep("A")
    assert (run.settings, run.changed) == ({"pace": 9.0}, ("pace",))


def test_nothing_to_keep_is_said():
    with pytest.raises(ValueError, match="no token was generated yet"):
        RunView(1, 2, 1).keep("A")


def pair():
    a = view_of(*[WHOLE[0], [WHOLE[1]]]).keep("A")
    return a, dataclasses.replace(a, name="B", tokens_per_s=a.tokens_per_s * 1.1, p50_ms=a.p50_ms * 1.1,
                                  text=a.text[:9] + "!", digest="other", settings={"pace": 20.0})  # fmt: skip


def test_a_beside_b():
    a, b = pair()
    both = Comparison(a, b)
    lines = {line.label: line for line in both.lines}
    assert lines["tokens/s"].change == pytest.approx(0.1) and lines["tokens/s"].better == "B"
    assert lines["ms a token P50"].better == "A" and lines["tokens"].better == ""
    assert not both.same and both.differs == 9 and "from character 9 on" in both.verdict
    assert both.settings == [("pace", "30.0", "20.0")]
    assert "+10.0 %" in repr(both) and "+10.0 %" in both._repr_html_()
    assert Comparison(a, a).same and "token by token" in Comparison(a, a).verdict
    longer = dataclasses.replace(a, digest="x")
    assert "the tokens are not" in Comparison(a, longer).verdict


def test_names(tmp_path):
    runs, (a, b) = Runs(), pair()
    with pytest.raises(ValueError, match="two kept runs are needed"):
        runs.compare()
    for run in (a, b, dataclasses.replace(a)):
        runs.add(run)
    assert list(runs) == ["B", "A"] and len(runs) == 2 and runs.free() == "C"
    assert runs.compare().a.name == "B" and runs.compare("A", "B").b is b
    with pytest.raises(KeyError, match="there are B, A"):
        runs.compare("A", "Z")
    with pytest.raises(ValueError, match="1 to 40 characters"):
        runs.add(dataclasses.replace(a, name=" "))
    del runs["B"]
    assert "A: " in repr(runs) and "B" not in runs


def test_files(tmp_path, monkeypatch):
    runs, (a, b) = Runs(), pair()
    runs.add(dataclasses.replace(a, prompt='a|b\n"c"'))
    runs.add(b)
    with runs.to_csv(tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["A", "B"]
    assert rows[0]["prompt"] == 'a|b\n"c"' and rows[0]["settings"] == '{"pace": 30.0}'
    assert float(rows[1]["tokens_per_s"]) == b.tokens_per_s
    lines = runs.to_markdown(tmp_path / "runs.md").read_text().splitlines()
    assert len(lines) == 4 and {line.count(" | ") for line in lines} == {len(FIGURES) + 1}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotAvailable, match=r"colibri-lab\[parquet\]"):
        runs.to_parquet(tmp_path / "runs.parquet")
    assert not (tmp_path / "runs.parquet").exists()
    arrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    arrow.table, arrow.parquet = lambda columns: columns, parquet
    parquet.write_table = lambda table, file: file.write(repr(table).encode())
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    assert "'name': ['A', 'B']" in runs.to_parquet(tmp_path / "runs.parquet").read_text()
    assert len(list(tmp_path.iterdir())) == 3, "no temporary file is left"
