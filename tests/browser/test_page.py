"""The board as a page of its own: `colibri-lab board`, and a notebook under Voila."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from colibri_lab.telemetry import Recorder
from tests.browser import lab
from tests.browser.servers import TOP, Page
from tests.browser.test_board import button, shot
from tests.widgets.fake import FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture()
def serve(tmp_path):
    served = []

    def start(*options, notebook=None):
        served.append(Page(tmp_path, *options, notebook=notebook))
        return served[-1]

    yield start
    for page in served:
        page.close()


def kernels(served):
    found = []
    for child in psutil.Process(served.process.pid).children(recursive=True):
        try:
            found += [child] if "ipykernel_launcher" in " ".join(child.cmdline()) else []
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return found


def test_from_start_to_stop_without_a_cell(page, serve):
    served = serve("--set", "expert_cache_bytes=4MiB", "--set", "pace=40")
    page.goto(served.url)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    assert page.title() == "Colibri Lab" and lab.data(page, "theme") == "light"
    assert page.locator(".jp-InputArea").count() == 0, "no cell is shown"
    page.locator(".cl-controls textarea").fill("The young lady")
    page.get_by_role("spinbutton", name="at most").fill("900")  # it must not end by itself
    button(page, "Start").click()
    lab.until(lambda: lab.data(page, "state") == "generating", "generation starts")
    memory = page.locator(".cl-tile-memory span")
    assert memory.inner_text() == "of 4.00 MiB"
    page.get_by_label("experts in memory").press("Home")
    lab.until(lambda: memory.inner_text() == "of 128 KiB", "the engine's own budget changes")
    lab.until(lambda: page.locator(".cl-piece").count() > 60, "text comes")
    shot(page, "page")
    button(page, "Stop").click()
    lab.until(lambda: lab.data(page, "state") == "idle", "stop")
    assert lab.foreign(page) == []
    assert len(kernels(served)) == 1
    page.goto("about:blank")
    lab.until(lambda: not kernels(served), "the page's engine goes with the page")


def test_three_questions_on_the_page(page, serve):
    """The clicks of docs/first_minutes.md after `make board`: Start, and one tab."""
    page.goto(serve("--set", "expert_cache_bytes=4MiB", "--set", "pace=40").url)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    button(page, "Start").click()
    lab.until(lambda: lab.data(page, "state") == "generating", "the board moves")
    lab.until(lambda: lab.data(page, "state") == "idle", "the text is whole")
    says = page.locator(".cl-findings")
    lab.says(says, "(P99)")
    assert re.match(r"Layer \d faults most: ", says.inner_text())
    page.get_by_role("tab", name="What if").click()
    lab.until(lambda: "At this budget" in says.inner_text(), "the policies are compared")
    shot(page, "page_questions")


def test_a_recorded_run_as_a_dark_page(page, serve, tmp_path):
    engine = FakeEngine(layers=24, experts=64, top_k=4, slots=2048)
    with Recorder(engine.telemetry, tmp_path / "a run.jsonl", engine.describe()):
        engine.run(200)
    page.goto(serve("--replay", "a run.jsonl", "--dark").url)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    assert (lab.data(page, "state"), lab.data(page, "theme")) == ("recorded", "dark")
    lab.until(lambda: page.locator(".cl-piece").count() == 200, "all of its text")
    button(page, "Play").click()
    lab.until(lambda: lab.data(page, "state") == "replay", "it plays")
    shot(page, "page_replay")
    assert lab.foreign(page) == []


def test_the_quickstart_under_voila(page, serve):
    """All of it runs; then its board is there, and moves when a person starts it."""
    page.goto(
        serve("--VoilaConfiguration.show_tracebacks=True", notebook=TOP / "notebooks" / "00_quickstart.ipynb").url
    )
    picture = page.locator(".jp-OutputArea-output svg").last
    picture.wait_for(timeout=180_000)
    assert "the same text, and at most one read for each expert" in page.locator("body").inner_text()
    assert page.locator("[data-mime-type='application/vnd.jupyter.error'], .jp-RenderedText.jp-mod-error").count() == 0
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    lab.until(lambda: lab.data(page, "state") == "idle", "the last run is on the board")
    page.locator(".cl-sliders [data-name=pace]").fill("20")  # tokens a second: it can be watched
    page.locator(".cl-controls textarea").fill("The young lady")
    before, updates = lab.pixels(page), int(lab.data(page, "updates"))
    button(page, "Start").click()
    lab.until(lambda: "The young lady" in page.locator(".cl-prompt").inner_text(), "another text comes")
    lab.until(lambda: int(lab.data(page, "updates")) > updates + 3, "picture after picture")
    lab.until(lambda: lab.pixels(page) != before, "the panels move")
    if folder := os.environ.get("COLIBRI_SHOTS"):
        page.screenshot(path=str(Path(folder) / "page_quickstart.png"), full_page=True)
