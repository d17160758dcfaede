"""Panels that stand alone: live where there is a kernel, a picture where there is none, and no cost of their own."""

from __future__ import annotations

import pytest
from ipywidgets.widgets.widget import _instances

from colibri_lab.widgets.dashboard import connect, replay
from tests.widgets.fake import FakeEngine

VIEW = "application/vnd.jupyter.widget-view+json"
NAMES = {"experts": "experts", "stages": "time", "latency": "latency", "kv": "kv", "text": "text", "whatif": "whatif"}
NAMES |= {name: name for name in ("pages", "router", "dispatch", "batch", "gpu")}


@pytest.fixture()
def lab():
    opened = connect(FakeEngine(rate=2000, all_systems=True), hz=1)
    opened.generate("a <b>", max_tokens=40)
    assert opened.wait(10)
    yield opened
    opened.close()


def shown(what, board, panel):
    bundle = what._repr_mimebundle_()
    widget = _instances[bundle[VIEW]["model_id"]]
    assert (widget.board, widget.panel) == (f"anywidget:{board.model_id}", panel)
    assert bundle["text/html"] == what._repr_html_() and bundle["text/plain"] == repr(what)
    return widget, bundle["text/html"]


@pytest.mark.parametrize("name", [*NAMES, "tuner"])
def test_a_panel_is_live_and_has_a_picture(lab, name):
    widget, html = shown(getattr(lab, name), lab.board, NAMES.get(name, name))
    again, _ = shown(getattr(lab, name), lab.board, NAMES.get(name, name))
    assert widget is again, "a cell that runs again leaves nothing behind"
    assert ("<table" if name == "tuner" else "class='card'") in html
    assert len(widget._esm) < 1000, "the page takes the code from the board"


def test_panels_send_nothing_and_go_with_the_board(lab, wire):
    widgets = [shown(getattr(lab, name), lab.board, panel)[0] for name, panel in NAMES.items()]
    lab.board.tick()
    del wire.messages[:]
    lab.engine.run(3)
    lab.board.tick()
    assert len(wire.messages) == 1, "one message, however many panels are open"
    lab.close()
    assert all(widget.comm is None for widget in widgets)


def test_a_figure_stands_still_and_the_text_is_a_text(lab):
    bundle = lab.figure("kv")._repr_mimebundle_()
    assert VIEW not in bundle and "<svg" in bundle["text/html"]
    assert lab.text == lab.session.text and lab.text[:3] == str(lab.session.text)[:3]
    assert "a &lt;b&gt;" in lab.text._repr_html_()
    with pytest.raises(ValueError, match="no panel is named kvs"):
        lab.panel("kvs")


def test_a_player_has_the_same_panels(lab, tmp_path):
    with lab.record(tmp_path / "run.jsonl"):
        lab.generate("a <b>", max_tokens=10)
        lab.wait(10)
    with replay(tmp_path / "run.jsonl", hz=1) as player:
        for name, panel in NAMES.items():
            shown(getattr(player, name), player.board, panel)
        assert player.text == lab.text
