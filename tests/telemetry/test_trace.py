"""trace.jsonl: what was recorded comes back exactly; a hostile or broken file is told, not believed."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.errors import ConfigError
from colibri_lab.telemetry import NullTelemetry, Recorder, Telemetry, TraceError, replay
from tests.widgets.fake import FakeEngine

PAGE = b'{"e":"page","t_ns":-1,"kind":0,"layer":0,"expert":0,"pages":1,"wait_ns":0,"step":0}'
STREAMS = ("tokens", "route", "weight", "slot", "pages", "slots", "sequences", "gauges")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(path of a trace, the engine that made it, what a live reader saw)"""
    path = tmp_path_factory.mktemp("trace") / "run é.jsonl"
    engine = FakeEngine(layers=3, experts=5, slots=64)
    cursor, recorder = engine.telemetry.cursor(), Recorder(engine.telemetry, path, engine.describe())
    engine.telemetry.note("prompt", "so \u2028 weit")
    engine.settings.telemetry_top_logprobs = 3
    engine.run(60)
    assert not path.exists(), "a trace has its name only when it is whole"
    assert recorder.close() == path
    return path, engine, engine.telemetry.read(cursor)


def same(ours, theirs):
    """Equal arrays; of records, field by field, so that NaN equals NaN."""
    for name in ours.dtype.names or [...]:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_replay_gives_the_live_arrays_exactly(recorded):
    path, engine, live = recorded
    source = replay(path)
    assert (source.layers, source.experts, source.top_k) == (3, 5, 2)
    assert source.engine == engine.describe()
    assert source.trouble == []
    batch = source.read(source.cursor())
    for name in STREAMS:
        ours, theirs = getattr(batch, name), getattr(live, name)
        assert ours.dtype == theirs.dtype
        same(ours, theirs)
    assert batch.texts == live.texts
    assert batch.notes == live.notes
    assert batch.logprobs == live.logprobs and len(batch.logprobs) == 60
    assert batch.names == live.names
    assert "pager.faults" in batch.names and len(batch.gauges) > 1
    assert "Recorded run" in source._repr_html_()


def test_every_line_is_strict_json(recorded):
    for line in recorded[0].read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_replay_in_slices_of_time_is_the_same_as_at_once(recorded):
    source = replay(recorded[0])
    whole, cursor = source.read(source.cursor()), source.cursor()
    parts = [source.read_until(cursor, int(t)) for t in np.linspace(source.start_ns, source.end_ns, 13)]
    parts.append(source.read(cursor))
    assert sum(len(part.tokens) > 0 for part in parts) > 5
    for name in STREAMS:
        same(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
    assert [text for part in parts for text in part.texts] == whole.texts
    assert [note for part in parts for note in part.notes] == whole.notes


def test_notes_come_back_when_they_were_made(tmp_path):
    telemetry = Telemetry(1, 2, 1)
    for t in (10, 20, 30):
        telemetry.sequence(t, 0, 1, 1)
        telemetry.note("batch", {"size": t}, t + 5)
    source = replay(Recorder(telemetry, tmp_path / "t.jsonl").close())
    cursor = source.cursor()
    assert [source.read_until(cursor, t).notes for t in (20, 25, 99)] == [
        [("batch", {"size": 10}, 15)], [("batch", {"size": 20}, 25)], [("batch", {"size": 30}, 35)]]  # fmt: skip


def test_gauges_that_appear_later_and_go_away(tmp_path):
    telemetry = Telemetry(1, 2, 1)
    recorder = Recorder(telemetry, tmp_path / "t.jsonl")
    telemetry.gauges(1, {"a": {"x": 1}})
    recorder._stop.set()
    recorder._thread.join()
    recorder._drain()
    telemetry.gauges(2, {"a": {"x": 2, "y": {"z": 0.5}}})
    telemetry.gauges(3, {"a": {"y": {"z": float("inf")}}})
    source = replay(recorder.close())
    batch = source.read(source.cursor())
    assert batch.names == ("a.x", "a.y.z")
    assert batch.gauges["t_ns"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(batch.gauges["value"][:, :2], [[1, np.nan], [2, 0.5], [np.nan, np.nan]])
    assert np.isnan(batch.gauges["value"][:, 2:]).all()


def without(tokens):
    """As versions before 4 knew them."""
    tokens = tokens.copy()
    tokens["router_ns"] = tokens["dispatch_ns"] = 0
    return tokens


def test_a_trace_of_version_1_opens(recorded, tmp_path):
    lines = []
    for line in recorded[0].read_text(encoding="utf-8").split("\n")[:-1]:
        event = json.loads(line)
        if event["e"] == "note":
            del event["t_ns"]
        if event["e"] == "header":
            event["version"] = 1
        if event["e"] not in ("gauge", "names"):
            lines.append(json.dumps(event) + "\n")
    old = tmp_path / "old.jsonl"
    old.write_text("".join(lines))
    source, new = replay(old), replay(recorded[0])
    batch, whole = source.read(source.cursor()), new.read(new.cursor())
    np.testing.assert_array_equal(batch.tokens, without(whole.tokens))
    assert batch.names == () and len(batch.gauges) == 0
    assert batch.notes == [(key, value, 0) for key, value, _ in whole.notes]


def test_a_trace_of_version_2_opens(recorded, tmp_path):
    lines = recorded[0].read_text(encoding="utf-8").split("\n")[:-1]
    old = tmp_path / "old.jsonl"
    lines[0] = lines[0].replace('"version":4', '"version":2')
    kept = [line for line in lines if '"logprobs"' not in line]
    old.write_text("\n".join(kept) + "\n", encoding="utf-8")
    source, new = replay(old), replay(recorded[0])
    batch, whole = source.read(source.cursor()), new.read(new.cursor())
    np.testing.assert_array_equal(batch.tokens, without(whole.tokens))
    assert (batch.logprobs, len(whole.logprobs)) == ([], 60)
    assert batch.notes == whole.notes


def test_a_trace_of_version_3_has_fewer_stages(recorded, tmp_path):
    old, lines = tmp_path / "old.jsonl", []
    for line in recorded[0].read_text(encoding="utf-8").split("\n")[:-1]:
        event = json.loads(line)
        if event["e"] == "header":
            event["version"] = 3
        for name in ("router_ns", "dispatch_ns"):
            event.pop(name, None)
        lines.append(json.dumps(event) + "\n")
    old.write_text("".join(lines))
    rows = replay(old)["tokens"]
    assert len(rows) and not rows["router_ns"].any() and not rows["dispatch_ns"].any() and rows["attention_ns"].any()
    new = tmp_path / "new.jsonl"
    new.write_text("".join(lines).replace('"version": 3', '"version": 4'))
    with pytest.raises(TraceError, match="router_ns"):
        replay(new)


def test_a_trace_cut_in_the_middle_of_a_line_replays_what_is_whole(recorded, tmp_path):
    lines = recorded[0].read_bytes().split(b"\n")
    cut = tmp_path / "cut.jsonl.part"
    cut.write_bytes(b"\n".join(lines[:40]) + b"\n" + lines[40][: len(lines[40]) // 2])
    source = replay(cut)
    assert source.counters()["events"] == 38, "names of gauges are a line, and no event"
    assert source.trouble == ["line 41 was cut short and is left out; the 40 before it are whole"]


def test_missed_events_are_recorded_and_come_back_where_they_were(tmp_path):
    path, telemetry = tmp_path / "t.jsonl", Telemetry(1, 2, 1, capacity=4)
    recorder = Recorder(telemetry, path)
    recorder._stop.set()
    recorder._thread.join()
    for i in range(2):
        telemetry.slot(i, 0, i, 1, 0, 0)
    recorder._drain()
    for i in range(2, 9):
        telemetry.slot(i, 0, i, 1, 0, 0)
    recorder.close()
    source, seen = replay(path), []
    cursor = source.cursor()
    while len(batch := source.read(cursor)) or batch.dropped:
        seen.append((batch.missing.get("slots", 0), batch.slots["slot"].tolist()))
    assert seen == [(0, [0, 1]), (3, [5, 6, 7, 8])]
    assert source.counters() == {"events": 6, "dropped": 3}


def test_weights_that_are_not_finite_stay_strict_json(tmp_path):
    telemetry = Telemetry(1, 2, 1)
    recorder = Recorder(telemetry, tmp_path / "t.jsonl")
    one, weight = np.ones(1, "u4"), np.full((1, 1, 1), np.nan, "f2")
    route, slot = np.zeros((1, 1, 1), "u2"), np.zeros((1, 1), "i4")
    telemetry.step(1, one, one, one, 1, 9, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, route, weight, slot)
    source = replay(recorder.close())
    assert np.isnan(source.read(source.cursor()).weight).all()


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path):
    telemetry = Telemetry(1, 2, 1)
    recorder = Recorder(telemetry, tmp_path / "t.jsonl")
    recorder._stop.set()
    recorder._thread.join()
    recorder.error = OSError(28, "No space left on device")
    telemetry.text(1, 1, "goes on")
    with pytest.raises(OSError, match="No space left"):
        recorder.close()
    assert not (tmp_path / "t.jsonl").exists()


def head(lines, **fields):
    """The trace with other fields in its header."""
    return [json.dumps(json.loads(lines[0]) | fields).encode(), *lines[1:]]


def after(lines, **event):
    """The trace with an event as its sixth line."""
    return [*lines[:5], json.dumps(event).encode(), *lines[5:]]


def snapshot(lines, **value):
    return after(lines, e="note", key="snapshot", value={"slots": []} | value)


def odds(lines, **fields):
    return after(lines, **{"e": "logprobs", "sequence": 1, "position": 1, "chosen": [1, "a", -1], "best": []} | fields)


def gauge(lines, rest):
    """The trace's header, one name and a gauge."""
    return [lines[0], b'{"e":"names","names":["x"]}', b'{"e":"gauge","t_ns":' + rest + b"}"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [], "not a trace"),
        (lambda lines: [b"hello", *lines], "not a trace"),
        (lambda lines: [lines[0].replace(b'"version":4', b'"version":7'), *lines[1:]], "trace version 7"),
        (lambda lines: [lines[0].replace(b'"layers":3', b'"layers":-3'), *lines[1:]], "layers must be a whole number"),
        (lambda lines: [lines[0].replace(b'"layers":3', b'"layers":4'), *lines[1:]], "reshape|inhomogeneous|shape"),
        (lambda lines: [*lines[:5], b"[1, 2]", *lines[5:]], "line 6: not a JSON object"),
        (lambda lines: [*lines[:5], b'{"e": "token", "t_ns": 1}', *lines[5:]], "line 6: field 'sequence' is missing"),
        (lambda lines: [*lines[:5], b'{"e": "magic"}', *lines[5:]], "line 6: unknown event 'magic'"),
        (lambda lines: [*lines[:5], b'{"e": "text", "x": NaN}', *lines[5:]], "line 6: not a JSON object"),
        (lambda lines: [*lines[:5], PAGE, *lines[5:]], "line 6"),
        (lambda lines: [*lines[:5], b'"' + b"x" * (1 << 20) + b'"', *lines[5:]], "longer than"),
        (lambda lines: [*lines[:5], b"[" * 100_000, *lines[5:]], "line 6"),
        (lambda lines: head(lines, layers=1024, experts=65535), "layers times experts must be at most"),
        (lambda lines: head(lines, layers=1024, top_k=256), "layers times top_k must be at most"),
        (lambda lines: head(lines, engine={"kv_slots": 10**12}), "header: kv_slots must be a whole number from 0 to"),
        (lambda lines: head(lines, engine={"kv_slots": -5}), "header: kv_slots"),
        (lambda lines: head(lines, engine={"expert_bytes": "many"}), "header: expert_bytes .* not many"),
        (lambda lines: after(lines, e="note", key="settings", value={"expert_cache_bytes": "4M"}), "line 6: expert_"),
        (lambda lines: after(lines, e="slot", t_ns=1, kind=0, slot=1 << 24, sequence=1, layer=0, owner=0), "6: slot"),
        (lambda lines: after(lines, e="text", sequence=1, position=10**20, text="x"), "line 6: position must be"),
        (lambda lines: after(lines, e="text", sequence=1, position=1, text="\ud800"), "line 6: not a JSON object"),
        (lambda lines: after(lines, e="note", key="a", value=1, t_ns=-1), "line 6: t_ns must be"),
        (lambda lines: after(lines, e="note", key="snapshot", value=[]), "line 6: a snapshot must have"),
        (lambda lines: snapshot(lines, resident=[15], pinned=[]), "snapshot: resident must be numbers below 15"),
        (lambda lines: snapshot(lines, resident=[], pinned=[True]), "line 6: snapshot: pinned must be"),
        (lambda lines: snapshot(lines, resident=[]), "line 6: field 'pinned' is missing"),
        (lambda lines: snapshot(lines, resident=[], pinned=[], ahead=[15]), "snapshot: ahead must be numbers below 15"),
        (lambda lines: snapshot(lines, slots=[[1, 2]]), "line 6: snapshot: a slot must be five whole numbers"),
        (lambda lines: snapshot(lines, slots=[[1 << 24, 1, 0, 0, 0]]), "line 6: snapshot: slot 16777216 has numbers"),
        (lambda lines: snapshot(lines, slots=[[1, 1, 3, 0, 0]]), "line 6: snapshot: slot 1 has numbers"),
        (lambda lines: snapshot(lines, slots=[[1, 1, 0, -2, 0]]), "line 6: snapshot: slot 1 has numbers"),
        (lambda lines: after(lines, e="names", names=["x"] * 2), "line 6: a name of a gauge is there twice"),
        (lambda lines: after(lines, e="names", names=["x" * 201]), "line 6: names must be"),
        (lambda lines: after(lines, e="names", names={"x": 1}), "line 6: names must be"),
        (lambda lines: after(lines, e="names", names=[str(i) for i in range(193)]), "more than 192 names"),
        (lambda lines: [*lines, b'{"e":"gauge","t_ns":1,"value":[1]}'], "value must be a list of"),
        (lambda lines: gauge(lines, b'1,"value":[1e999]'), "line 3: value must hold numbers"),
        (lambda lines: gauge(lines, b'1,"value":[true]'), "line 3: value must hold numbers"),
        (lambda lines: gauge(lines, b'1.5,"value":[1]'), "line 3: t_ns must be"),
        (lambda lines: after(lines, e="dropped", stream="tokens", count=-5), "line 6: count must be"),
        (lambda lines: odds(lines, chosen=[1, "a"]), "line 6: a choice must be"),
        (lambda lines: odds(lines, chosen=[-1, "a", -1]), "line 6: a choice must begin with a token id"),
        (lambda lines: odds(lines, chosen=[1, "a" * 201, -1]), "line 6: a choice must begin"),
        (lambda lines: odds(lines, chosen=[1, "a", 0.5]), "line 6: a choice's logprob"),
        (lambda lines: odds(lines, best=[[1, "a", True]]), "line 6: a choice's logprob"),
        (lambda lines: odds(lines, best=[[1, "a", -1]] * 65), "line 6: best must be a list of at most 64"),
        (lambda lines: odds(lines, position=-1), "line 6: position must be"),
    ],
)  # fmt: skip
def test_hostile_files_name_the_file_and_the_line(recorded, tmp_path, change, says):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"\n".join(change(recorded[0].read_bytes().split(b"\n")[:-1])) + b"\n")
    with pytest.raises(TraceError, match=says) as caught:
        replay(bad)
    assert "bad.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, "."):
        with pytest.raises(IsADirectoryError, match="is a folder, not a file"):
            Recorder(Telemetry(1, 1, 1), folder)
    os.mkfifo("pipe")
    with pytest.raises(OSError, match="is a device or a pipe"):
        Recorder(Telemetry(1, 1, 1), "pipe")
    assert os.listdir() == ["pipe"]
    os.remove("pipe")
    with pytest.raises(ConfigError, match="telemetry: must be on"):
        Recorder(NullTelemetry(1, 1, 1), tmp_path / "t.jsonl")
    assert not list(tmp_path.iterdir())


def test_no_file(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        replay(tmp_path / "none.jsonl")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_give_an_error_or_a_trace(recorded, tmp_path, data):
    raw = bytearray(recorded[0].read_bytes()[:6000])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    bad = tmp_path / "fuzz.jsonl"
    bad.write_bytes(bytes(raw))
    try:
        source = replay(bad)
    except TraceError:
        return
    source.read(source.cursor())
