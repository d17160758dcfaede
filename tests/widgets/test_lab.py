"""The lab over an invented engine: hands on the engine, one picture at a time, nothing left behind."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from ipywidgets.widgets.widget import _instances

from colibri_lab.view.frame import unpack
from colibri_lab.widgets.board import Board
from colibri_lab.widgets.dashboard import Lab, connect, replay
from colibri_lab.widgets.ticker import Ticker
from tests.view.whole import shown
from tests.widgets.fake import FakeEngine


@pytest.fixture()
def lab():
    opened = connect(FakeEngine(rate=400), hz=10)
    yield opened
    opened.close()


def until(check, seconds=60.0):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


def picture(lab):
    return shown(lab.board)[0]


def press(lab, **content):
    """What the page sends when a person does something."""
    lab.board._handle_custom_msg(content, [])


def test_generate_returns_at_once_and_the_board_shows_all(lab):
    lab.engine.rate = 10
    lab.generate("Once upon", max_tokens=80)
    assert lab.state == "generating", "all of it would take 8 s"
    lab.engine.rate = 400
    assert lab.wait(60)
    assert lab.error is None
    shown = picture(lab)
    assert (shown["state"], shown["made"], shown["max_tokens"]) == ("idle", 80, 80)
    text = unpack(lab.board.prose)[0]["text"]
    assert "".join(text["piece"]) == lab.text
    assert text["prompt"] == "Once upon"
    assert lab.board.prompt == "Once upon"


def test_pause_resume_stop(lab):
    lab.generate("a", max_tokens=100_000)
    until(lambda: len(lab.session.tokens) > 5)
    lab.pause()
    seen = [-1]

    def stands():
        seen.append(len(lab.session.tokens))
        time.sleep(0.15)
        return seen[-1] == len(lab.session.tokens)

    until(stands)
    count = seen[-1]
    assert (lab.state, len(lab.session.tokens)) == ("paused", count)
    assert not lab.wait(), "a paused generation does not end by itself"
    assert picture(lab)["state"] == "paused"
    lab.resume()
    until(lambda: len(lab.session.tokens) > count)
    assert not lab.wait(0.05), "it still runs"
    lab.stop()
    assert lab.wait(5)


def test_settings_reach_the_engine_and_come_back(lab):
    names = {item["name"]: item for item in lab.board.controls}
    assert names["expert_cache_bytes"] | {"help": ""} == {
        "name": "expert_cache_bytes", "label": "experts in memory", "unit": "MiB", "scale": 1 << 20, "min": 0.125,
        "max": 8.0, "step": 0.0625, "help": "",
    }  # fmt: skip
    lab.generate("a", max_tokens=100_000)
    frames = lab.engine.counters()["pager"]["frames"]
    press(lab, do="set", name="expert_cache_bytes", value=2 << 20)
    assert lab.engine.counters()["pager"]["frames"] == 32 < frames
    press(lab, do="set", name="pace", value=25)
    assert lab.engine.settings.pace == 25
    press(lab, do="set", name="pace", value=0)
    assert lab.engine.settings.pace is None
    press(lab, do="set", name="window", value=16)
    lab.board.tick()
    shown = picture(lab)
    assert shown["settings"] == {"expert_cache_bytes": 2 << 20, "pace": 0, "window": 16}
    assert shown["budget"] == 2 << 20
    assert shown["window"] == 16


def test_buttons_do_what_they_say(lab):
    press(lab, do="start", prompt="from the page", max_tokens=100_000)
    until(lambda: lab.state == "generating")
    press(lab, do="pause")
    assert lab.state == "paused"
    press(lab, do="resume")
    press(lab, do="stop")
    assert lab.wait(5)


@pytest.mark.parametrize("content", [{"do": "fly"}, {}, {"do": "start"}, {"do": "set", "name": "pace", "value": "x"},
                                     {"do": "set", "name": "threads", "value": 1}])  # fmt: skip
def test_what_goes_wrong_is_said_on_the_board(lab, content):
    press(lab, **content)
    lab.board.tick()
    assert picture(lab)["error"]
    press(lab, do="stop")
    lab.board.tick()
    assert picture(lab)["error"] is None
    assert lab.error is None


def test_an_error_in_the_generation_is_kept_and_shown(lab):
    lab.engine.step = None  # the worker thread will trip over it
    lab.generate("a")
    assert lab.wait(5)
    assert isinstance(lab.error, TypeError)
    assert picture(lab)["state"] == "error"
    assert "TypeError" in picture(lab)["error"]


def test_nothing_is_sent_when_nothing_changed(wire):
    lab = connect(FakeEngine(), hz=10)
    until(lambda: not lab.board.tick())
    before = len(wire.messages)
    time.sleep(0.5)
    assert len(wire.messages) == before
    assert not lab.board.tick()
    lab.close()


def test_a_flood_of_events_is_a_bounded_number_of_messages(wire):
    engine = FakeEngine()
    lab = connect(engine, hz=8)
    del wire.messages[:]
    sequence, begin, n = engine.start(1), time.monotonic(), 0
    while n < 50_000:
        for _ in range(500):
            engine.telemetry.page(time.perf_counter_ns(), 0, n % 8, n % 16, 1, 1, n)
            n += 1
        engine.step(sequence, n // 500, 1)
        time.sleep(max(0.0, begin + n / 50_000 - time.monotonic()))
    until(lambda: unpack(wire.updates()[-1]["frame"])[0]["faults"] == engine.total["faults"])
    updates, seconds = wire.updates(), time.monotonic() - begin
    assert 3 <= len(updates) <= 8 * seconds + 2
    last = unpack(updates[-1]["frame"])[0]
    assert last["faults"] == engine.total["faults"], "the last state is delivered"
    events = engine.telemetry.counters()["events"]
    assert lab.view.events + lab.view.missing == events
    assert max(size for _, _, size in wire.messages) < 12_000
    lab.close()


def test_one_update_is_one_message_of_few_bytes(wire):
    engine = FakeEngine()
    lab = connect(engine, hz=1)
    lab.board._ticker.stop()
    sequence = engine.start(1)
    for position in range(300):
        engine.step(sequence, position, int(position > 0))
        engine.telemetry.text(sequence, position + 1, " word")
        if position % 5 == 0:
            del wire.messages[:]
            assert lab.board.tick()
            assert len(wire.messages) == 1
    assert wire.messages[0][2] < 12_000
    lab.close()


def test_running_the_cell_again_leaves_nothing_behind():
    engine, counts, threads = FakeEngine(), [], []
    for _ in range(20):
        lab = connect(engine)
        lab._repr_mimebundle_()
        lab._repr_mimebundle_()
        gc.collect()
        counts.append(len(_instances))
        threads.append(threading.active_count())
    assert len(set(counts[1:])) == 1
    assert len(set(threads[1:])) == 1
    lab.close()
    assert engine.closed is False, "an engine that was connected stays open"


def test_closing_ends_threads_and_is_idempotent():
    before = threading.active_count()
    lab = connect(FakeEngine())
    lab.generate("a", max_tokens=100_000)
    lab.close()
    lab.close()
    assert threading.active_count() == before
    assert not lab.board._ticker.alive


def test_a_board_that_is_forgotten_ends_its_ticker():
    ticks = []

    class Owner:
        def act(self):
            ticks.append(1)

    owners = [Owner()]
    ticker = Ticker(owners[0].act, 10)
    until(lambda: len(ticks) > 2)
    owners.clear()
    until(lambda: not ticker.alive)


def test_ticks_that_fail_are_kept(lab):
    def broken():
        raise ValueError("no such view")

    lab.board._feed = broken
    until(lambda: lab.error is not None)
    assert "no such view" in str(lab.error)
    with pytest.raises(ValueError, match="1 to 10"):
        lab.board.hz = 50


def test_a_lab_has_a_picture_without_a_kernel(lab):
    lab.generate("a <b>", max_tokens=20)
    lab.wait(10)
    bundle = lab._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == lab.board.model_id
    assert "<svg" in bundle["text/html"]
    assert "a &lt;b&gt;" in bundle["text/html"]
    assert bundle["text/plain"] == "<Lab fake-moe: idle, 20 tokens>"


def test_record_and_replay(lab, tmp_path):
    recorder = lab.record(tmp_path / "run.jsonl")
    lab.generate("a", max_tokens=60)
    lab.wait(10)
    player = replay(recorder.close(), hz=10)
    live = picture(lab)
    again = picture(player)
    for name in ("decoded", "faults", "resident", "ms", "ttft", "hits", "kv", "peak"):
        assert again[name] == live[name], name
    assert player.state == "recorded"
    player.play(speed=0.25)
    until(lambda: picture(player)["state"] == "replay")
    player.pause()
    assert player.state == "paused"
    press(player, do="resume")
    until(lambda: player.state == "recorded", 10)
    player.board.tick()
    assert picture(player)["decoded"] == live["decoded"]
    assert player.report(tmp_path / "r.html").stat().st_size > 10_000
    assert player.error is None
    player.close()


def test_a_lab_that_loads_its_engine_closes_it(monkeypatch):
    made = []

    def load(path, overrides):
        made.append((path, overrides, FakeEngine()))
        return made[-1][2]

    monkeypatch.setattr("colibri_lab.widgets.dashboard._load", load)
    first = Lab("model", pace=40)
    second = Lab("model")
    assert made[0][:2] == ("model", {"pace": 40})
    assert made[0][2].closed, "the same cell run again does not hold the model twice"
    second.close()
    assert made[1][2].closed
    first.close()


def test_the_board_is_one_script_without_the_network():
    assert "http" not in Board._esm.replace("http://www.w3.org", "")
    assert "import " not in Board._esm.replace("// ", "")
    assert Board._esm.count("export default") == 1
