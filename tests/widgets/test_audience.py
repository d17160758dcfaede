"""For nobody no picture is made; who looks again, and who waits behind a busy kernel, loses nothing."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from colibri_lab.view.frame import unpack
from colibri_lab.widgets import audience
from colibri_lab.widgets.audience import Audience
from colibri_lab.widgets.dashboard import connect
from tests.widgets.fake import FakeEngine
from tests.widgets.test_lab import press, until


@pytest.fixture()
def lab(monkeypatch):
    monkeypatch.setattr(audience, "SILENT_S", 0.3)
    with connect(FakeEngine(rate=400), hz=10) as opened:
        yield opened


def test_nobody_looks_and_pictures_end_until_somebody_does(lab):
    lab.generate("a", max_tokens=100_000)
    until(lambda: lab.board.updates > 1)

    def followed_only():
        before, events = lab.board.updates, lab.view.events
        time.sleep(0.5)
        return lab.board.updates == before and lab.view.events > events

    until(followed_only)  # events are followed, so that figures and reports stay true
    before = lab.board.updates
    press(lab, do="look")
    until(lambda: lab.board.updates > before)
    assert unpack(lab.board.prose)[0]["text"]["at"][0] == 3, "a page that comes back gets all of the text"


def test_a_page_that_speaks_is_drawn_for(lab):
    lab.generate("a", max_tokens=100_000)
    before = lab.board.updates

    def looked():
        press(lab, do="look")
        time.sleep(0.1)
        return lab.board.updates - before >= 9  # in silence three would be made, and none after

    until(looked)


def test_the_last_picture_is_made_for_nobody_too(lab):
    """What a notebook keeps that ran without a page is the end of its run."""
    lab.generate("a", max_tokens=300)
    assert lab.wait(20)
    told, _ = unpack(lab.board.frame)
    assert (told["state"], told["made"]) == ("idle", 300)


def test_silence_does_not_count_while_the_kernel_is_busy(monkeypatch):
    monkeypatch.setattr(audience, "SILENT_S", 0.1)
    monkeypatch.setattr(audience, "_GRACE_S", 0.05)
    loop, made = asyncio.new_event_loop(), []

    async def make():
        made.append(Audience())

    loop.run_until_complete(make())
    (known,) = made
    time.sleep(0.2)
    assert known.looks() and known.looks(), "its loop has not come round: a cell runs"
    runner = threading.Thread(target=loop.run_forever)
    runner.start()
    until(lambda: not known.looks())
    assert known.hear(), "the board draws again"
    assert known.looks() and not known.hear()
    loop.call_soon_threadsafe(loop.stop)
    runner.join()
    loop.close()
    time.sleep(0.2)
    assert not known.looks()
