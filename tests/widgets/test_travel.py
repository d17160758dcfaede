"""Hands on the time line: hold, seek, step, return, save; the same for a lab and a recorded run."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from colibri_lab.events import Phase
from colibri_lab.view.frame import prose_block, unpack
from colibri_lab.widgets.dashboard import connect, replay
from tests.view.whole import blocks, shown
from tests.widgets.fake import FakeEngine
from tests.widgets.test_lab import picture, press, until

PANELS = ("cell", "mark", "stage", "count", "flag", "place", "slot", "bins", "bin", "fault", "sys", "age", "when")


def drawn(lab):
    """The panels' arrays and figures as the page has them, and what it shows of the text."""
    header, arrays = shown(lab.board)
    said = {name: header[name] for name in ("decoded", "ms", "faults", "resident", "kv", "hits", "rate", "ttft")}
    return said, {name: arrays[name].tolist() for name in PANELS}, header["text"]["sequence"], header["text"]["end"]


def seen(lab):
    """A page that looks gets all of the picture, however busy the machine is."""
    press(lab, do="look")
    lab.board._again = True
    return lab.board.tick()


@pytest.fixture()
def lab():
    """Two generations of 40 and 60 tokens on an invented clock; no ticker."""
    engine = FakeEngine(3, 6, slots=64, slot_size=16, all_systems=True)
    opened = connect(engine, hz=1)
    opened.board._ticker.stop()
    opened.told = {}
    t = time.perf_counter_ns() + 10**9  # after the snapshot
    for tokens in (40, 60):
        sequence = engine.start(5, t)
        for position in range(5 + tokens):
            phase = Phase.PREFILL if position < 5 else Phase.DECODE
            t += engine.step(sequence, position, phase, t) + 50_000
            if phase == Phase.DECODE:
                engine.telemetry.text(sequence, position + 1, f" w{position}")
                seen(opened)
                opened.told[opened.view.timeline.sampled - 1] = drawn(opened)
        engine.finish(sequence, 0, t)
    seen(opened)
    yield opened
    opened.close()


def test_every_token_shows_again_what_the_live_board_showed(lab):
    assert lab.at is None
    for token in (99, 0, 39, 40, 41, 12, 98):
        assert lab.seek(token) == token == lab.at
        assert drawn(lab) == lab.told[token]
        assert picture(lab)["past"] == {"first": 0, "last": 99, "at": token, "ago": picture(lab)["past"]["ago"]}
    lab.live()
    assert lab.at is None and picture(lab)["past"]["at"] == -1
    assert drawn(lab)[0]["decoded"] == 100


def test_steps_and_places_outside(lab):
    assert (lab.step(-1), lab.step(-1), lab.step(), lab.step(-10)) == (98, 97, 98, 88)
    assert (lab.seek(-1), lab.step()) == (99, 99)
    assert (lab.seek(-2), lab.seek(10**9), lab.seek(-(10**9)), lab.step(-1)) == (98, 99, 0, 0)
    assert connect(FakeEngine(1, 2)).at is None
    with connect(FakeEngine(1, 2)) as empty, pytest.raises(ValueError, match="nothing to go back to"):
        empty.seek(0)


def test_the_run_goes_on_while_the_picture_is_held(lab):
    lab.seek(70)
    before = drawn(lab)
    lab.engine.run(20, t_ns=lab.view.timeline.last_ns + 2 * 10**9)
    seen(lab)
    assert drawn(lab) == before
    past = picture(lab)["past"]
    assert (past["at"], past["last"]) == (70, 119) and past["ago"] > 1
    assert lab.keep().tokens == 20, "what is kept is the run, not the picture"
    assert lab.step() == 71
    lab.live()
    assert picture(lab)["past"]["at"] == -1 and picture(lab)["decoded"] == 120
    assert lab.board.moments["starts"] == [(0, 1), (40, 2), (100, 3)]


def test_a_move_along_the_time_line_is_one_picture(lab, wire, tmp_path):
    player = replay(lab.save(tmp_path / "run.trace"), hz=1)
    player.board._ticker.stop()
    for moved in (lab, player):
        for message in (
            {"do": "seek", "token": 50},
            {"do": "step", "by": -1},
            {"do": "seek", "token": 9},
            {"do": "live"},
        ):
            wire.messages.clear()
            press(moved, **message)
            assert not moved.board.tick(), "nothing is left to draw"
            assert sum("frame" in update for update in wire.updates()) == 1
    player.close()


def test_window_and_colours_stay_what_a_person_chose(lab):
    press(lab, do="set", name="window", value=16)
    press(lab, do="set", name="hue", value="sequence")
    lab.seek(20)
    assert (picture(lab)["window"], picture(lab)["owners"]) == (16, [1])
    press(lab, do="set", name="window", value=32)
    lab.live()
    assert picture(lab)["window"] == 32


def test_the_page_is_not_sent_text_that_it_has(lab, wire):
    lab.seek(90)
    lab.step(-5)
    assert not any("prose" in update for update in wire.updates())
    lab.seek(10)
    header = unpack(wire.updates()[-1]["prose"])[0]["text"]
    assert (header["sequence"], header["end"], header["epoch"]) == (1, 16, 1), "an earlier text, said to be another"
    lab.live()
    header = unpack(wire.updates()[-1]["prose"])[0]["text"]
    assert (header["sequence"], len(header["at"])) == (2, 60)


def test_messages_of_the_page(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    press(lab, do="seek", token=50)
    press(lab, do="step", by=-1)
    assert lab.at == 49
    press(lab, do="live")
    assert lab.at is None
    assert lab.board.moments["name"] == "run-1.trace"
    press(lab, do="save", name="run-1.trace")
    seen(lab)
    assert lab.board.moments["said"].startswith("saved run-1.trace, ") and lab.board.moments["name"] == "run-2.trace"
    for name, says in (
        ("run-1.trace", "is there already"),
        ("../x", "no folder"),
        ("", "1 to 100"),
        ("a" * 101, "1 to 100"),
    ):
        press(lab, do="save", name=name)
        seen(lab)
        assert says in picture(lab)["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["run-1.trace"]


def test_a_saved_run_is_the_same_board_without_the_engine(lab, tmp_path):
    path = lab.save(tmp_path / "run.trace")
    player = replay(path, hz=1)
    player.board._ticker.stop()
    seen(lab)
    assert blocks(player.view) == blocks(lab.view)
    assert prose_block(player.view) == prose_block(lab.view)
    for token in (99, 3, 40, 77, 39):
        assert player.seek(token) == lab.seek(token) == token
        assert drawn(player) == drawn(lab) == lab.told[token]
        assert prose_block(player.view) == prose_block(lab.shown)
    assert player.state == "paused" and player.at == 39
    player.play(speed=1000)
    until(lambda: seen(player) and player.state == "recorded" and player.at is None)
    assert picture(player)["decoded"] == 100
    player.seek(5)
    player.live()
    assert picture(player)["past"] == {"first": 0, "last": 99, "at": -1, "ago": 0.0}
    assert replay(player.save(tmp_path / "again.trace"), hz=1).board.frame != b""
    assert (tmp_path / "again.trace").read_bytes() == path.read_bytes()
    player.close()


def test_a_long_run_is_saved_from_where_it_is_kept_on(tmp_path):
    engine = FakeEngine(3, 6, slots=64, slot_size=16)
    with connect(engine, hz=1) as lab:
        lab.board._ticker.stop()
        lab.past.limit = 60_000
        t = time.perf_counter_ns() + 10**9
        for _ in range(3):
            sequence = engine.start(5, t)
            for position in range(300):
                t += engine.step(sequence, position, int(position > 4), t) + 50_000
                engine.telemetry.text(sequence, position + 1, f" w{position}")
                if position % 9 == 0:
                    seen(lab)
            engine.finish(sequence, 0, t)
        seen(lab)
        first = lab.past.first
        assert first > 300
        player = replay(lab.save(tmp_path / "run.trace"), hz=1)
        live, again = lab.view, player.view
        assert again.timeline.missing == live.timeline.decoded + live.timeline.prompt_rows - len(
            player.source._streams["tokens"]
        )
        assert again.timeline.columns["gap"][0] == again.timeline.missing, "what is missing is a gap with its number"
        assert (again.experts.resident == live.experts.resident).all()
        assert again.slots.used == live.slots.used
        last = lab.past.last
        for token in (last - 30, first + 2):
            lab.seek(token)
            player.seek(token - first)
            ours, theirs = player.view, lab.shown
            assert (ours.experts.resident == theirs.experts.resident).all()
            used = np.flatnonzero(~theirs.slots.free)
            assert np.flatnonzero(~ours.slots.free).tolist() == used.tolist()
            for name in ("sequence", "layer", "owner", "fill", "double"):
                assert (getattr(ours.slots, name)[used] == getattr(theirs.slots, name)[used]).all(), name
            assert ours.prose.after(-1).text == theirs.prose.after(-1).text
            assert ours.timeline.prompt_tokens == theirs.timeline.prompt_tokens
        player.close()


def test_one_token_in_figures_and_as_a_picture(lab):
    newest, other = lab.token(), lab.token(40)
    assert (newest.number, newest.sequence, newest.position, newest.text) == (99, 2, 65, " w64")
    assert (other.number, other.sequence, other.position) == (40, 2, 6)
    assert (newest.probability, newest.best) == (None, [])
    assert [len(layer) for layer in newest.experts] == [2, 2, 2] == [len(layer) for layer in newest.weights]
    assert sum(read == "read" for layer in newest.reads for read in layer) == newest.faults
    assert newest.faults + newest.hits == 6
    assert abs(sum(newest.stages_ms.values()) - newest.latency_ms) < 1e-6
    html = newest._repr_html_()
    assert "expert " in html and "layer 2" in html and "&#x27; w64&#x27;" in html
    assert repr(newest).startswith("<token 99 ' w64': ")
    with pytest.raises(ValueError, match=r"token 100 is not kept: 0 to 99 are kept"):
        lab.token(100)


def test_the_page_asks_for_a_token_and_gets_it_once(lab, wire, tmp_path):
    lab.engine.settings.telemetry_top_logprobs = 3
    lab.engine.run(10, t_ns=lab.view.timeline.last_ns + 10**6)
    seen(lab)
    del wire.messages[:]
    press(lab, do="token", sequence=3, position=9)
    told = [update["detail"] for update in wire.updates() if "detail" in update]
    assert len(told) == 1 and told[0] == lab.board.detail
    assert (told[0]["number"], told[0]["position"], len(told[0]["best"])) == (101, 9, 3)
    assert 0 < told[0]["probability"] < 1
    json.dumps(told[0], allow_nan=False)
    lab.engine.run(1, t_ns=lab.view.timeline.last_ns + 10**6)
    seen(lab)
    assert sum("detail" in update for update in wire.updates()) == 1, "not with frames"
    press(lab, do="token", sequence=3, position=900)
    seen(lab)
    assert "no longer kept" in picture(lab)["error"]
    player = replay(lab.save(tmp_path / "run.trace"), hz=1)
    press(player, do="token", sequence=3, position=9)
    assert player.board.detail == told[0], "the same in a recorded run, words and all"
    player.close()


def test_going_live_lets_go_of_the_copies(lab):
    lab.seek(90)
    assert lab.past._near is not None
    lab.live()
    assert lab.past._stops == {} and lab.past._near is None
