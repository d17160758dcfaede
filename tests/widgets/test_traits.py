"""A change is sent once and whole; equal data is not sent."""

from __future__ import annotations

from colibri_lab.view.run import RunView
from colibri_lab.widgets.board import Board
from colibri_lab.widgets.dashboard import connect
from tests.widgets.fake import FakeEngine


def quiet_board(view):
    board = Board(view, lambda: 0, lambda: {"state": "idle"}, lambda message: None, hz=1)
    board._ticker.stop()
    return board


def test_bytes_arrive_whole_and_equal_bytes_are_not_sent(wire):
    board = quiet_board(RunView(1, 2, 1))
    del wire.messages[:]
    every = bytes(range(256)) * 3
    board.frame = every
    assert [update["frame"] for update in wire.updates()] == [every]
    board.frame = bytes(bytearray(every))
    assert len(wire.messages) == 1
    board.close()


def test_one_changed_cell_is_one_message(wire):
    engine = FakeEngine(2, 4, slots=16)
    view, cursor = RunView(2, 4, 2, engine.describe()), engine.telemetry.cursor()
    board = Board(view, lambda: view.drain(engine.telemetry, cursor), lambda: {"state": "x"}, lambda m: None, hz=1)
    board._ticker.stop()
    board.tick()
    del wire.messages[:]
    engine.telemetry.page(1, 0, 1, 2, 1, 5, 0)
    assert board.tick()
    assert len(wire.messages) == 1
    assert not board.tick()
    assert len(wire.messages) == 1
    board.close()


def test_a_page_that_opens_gets_the_text_again(wire):
    engine = FakeEngine(2, 4, slots=16)
    view, cursor = RunView(2, 4, 2, engine.describe()), engine.telemetry.cursor()
    board = Board(
        view, lambda: view.drain(engine.telemetry, cursor), lambda: {"state": "generating"}, lambda m: None, hz=1
    )
    board._ticker.stop()
    engine.telemetry.text(1, 1, "a")
    board.tick()
    engine.telemetry.text(1, 2, "b")
    board.tick()
    assert "prose" not in wire.updates()[-1], "new text goes with the frame"
    board._handle_custom_msg({"do": "hello"}, [])
    board.tick()
    assert b'["a","b"]' in wire.updates()[-1]["prose"]
    board.close()


def test_settings_are_sent_when_they_change_and_not_with_frames(wire):
    with connect(FakeEngine(2, 4, slots=16), hz=1) as lab:
        lab.board._ticker.stop()
        lab.board.tick()
        del wire.messages[:]
        lab.engine.run(3)
        lab.board.tick()
        assert ["frame" in update for update in wire.updates()].count(True) == 1
        assert not any({"tuned", "tuner", "study", "whatif"} & set(update) for update in wire.updates())
        lab.set("prefill_chunk", 9)
        lab.board.tick()
        assert [u["tuned"]["values"]["prefill_chunk"] for u in wire.updates() if "tuned" in u] == ["9"]
