"""What a lab and a replay are asked for and cannot do: refused with the reason, before anything is made."""

from __future__ import annotations

import time

import pytest
from ipywidgets.widgets.widget import _instances

from colibri_lab.config import Config
from colibri_lab.errors import ConfigError
from colibri_lab.widgets.dashboard import Lab, connect, replay
from tests.widgets.fake import FakeEngine


def until(check, seconds=60.0):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lab_loads_what_an_engine_loads_and_drops_no_setting(monkeypatch):
    made = []
    monkeypatch.setattr("colibri_lab.widgets.dashboard._load", lambda *given: made.append(given) or FakeEngine())
    config = Config.make({"model_path": "somewhere"})
    with Lab(config, pace=3) as lab:
        assert made == [(config, {"pace": 3})]
    assert lab.engine.closed
    with pytest.raises(ConfigError, match="pace: the engine is loaded already"):
        Lab(FakeEngine(), pace=3)


def test_a_wrong_rate_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("colibri_lab.widgets.dashboard._load", lambda *_: pytest.fail("no model is loaded for nothing"))
    widgets, first = len(_instances), connect(FakeEngine())
    for hz in (0.5, 50, float("nan")):
        with pytest.raises(ValueError, match="1 to 10 times a second"):
            Lab("model", hz)
        with pytest.raises(ValueError, match="1 to 10 times a second"):
            Lab(first.engine, hz)
    first.generate("a", max_tokens=2)
    assert first.wait(10), "the lab that was there goes on"
    first.close()
    assert len(_instances) == widgets


def test_speeds_of_a_replay(tmp_path):
    with connect(FakeEngine()) as lab:
        recorder = lab.record(tmp_path / "t.jsonl")
        lab.engine.run(20)
    with replay(recorder.close()) as player:
        for speed in (-1, 0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"0\.01 to 1000 times"):
                player.play(speed)
        assert (player.state, player.speed) == ("recorded", 1.0)
        player.play(1000)
        until(lambda: player.state == "recorded")
        assert player.error is None
