"""Panels that stand alone in cells of a notebook, and what is pointed at in one of them marked in all."""

from __future__ import annotations

import time

import pytest

from tests.browser import lab
from tests.browser.test_board import ASK, IMPORT, SHOW, button, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
NAMES = "experts pages kv latency stages text tuner whatif router".split()
KINDS = dict(zip(NAMES, "experts systems slots latency time prose study study systems".split(), strict=True))


@pytest.fixture()
def panels(page, server, request):
    """A notebook with the engine, the board and each panel in a cell of its own."""
    page.set_viewport_size({"width": 1400, "height": 6400})  # JupyterLab draws what is in sight
    cells = [IMPORT, SHOW, ASK.replace("900", "400"), *(f"lab.{name}" for name in NAMES)]
    cells.append("print(len(lab.text), lab.text[:3], len(lab.board._alone), lab.error)")
    lab.open_notebook(page, server, server.notebook(f"panels_{request.node.name}.ipynb", *cells))
    for cell in (0, 1):
        lab.run_cell(page, cell)
        lab.ran(page, cell)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for(timeout=20_000)
    yield page
    assert lab.foreign(page) == []


def alone(page, name: str):
    """The panel that cell `lab.name` shows."""
    return page.locator(".jp-CodeCell").nth(3 + NAMES.index(name)).locator(f".cl-alone .cl-{KINDS[name]}")


def test_every_panel_stands_alone_and_live(panels):
    for i, name in enumerate(NAMES):
        lab.run_cell(panels, 3 + i)
        alone(panels, name).wait_for(timeout=10_000)
    lab.run_cell(panels, 2)
    assert panels.locator(".cl-alone").count() == len(NAMES)
    words = alone(panels, "latency").locator(".cl-sub")
    before = words.inner_text()
    lab.until(lambda: words.inner_text() != before, 5, "the panel moves")
    time.sleep(1)
    assert alone(panels, "text").locator(".cl-piece").count() > 20
    assert alone(panels, "router").locator(".cl-off").inner_text().startswith("off: ")
    assert alone(panels, "pages").locator(".cl-facts").inner_text().startswith("policy hits")
    lab.until(lambda: "of the run" in alone(panels, "whatif").inner_text(), 10, "somebody looks at the what-if")
    alone(panels, "tuner").get_by_label("prefill chunk").fill("17")
    alone(panels, "tuner").get_by_label("prefill chunk").press("Enter")
    board = panels.locator(".jp-CodeCell").nth(1)
    board.get_by_role("tab", name="Tuner").click()
    lab.until(
        lambda: board.get_by_label("prefill chunk").input_value() == "17", 2, "the board shows the panel's change"
    )
    button(panels, "Pause").click()
    lab.settle(panels)
    for name in NAMES:
        panel = alone(panels, name)
        if name != "router" and panel.locator("canvas").count():
            assert panel.locator("canvas").first.evaluate("(c) => c.width") > 200, name
    shot_all(panels, "alone")


def shot_all(page, name: str) -> None:
    shot(page, name + "_board")
    for one in NAMES:
        shot(page, f"{name}_{one}", what=alone(page, one))


def test_what_is_pointed_at_in_a_cell_is_marked_in_all(panels):
    lab.run_cell(panels, 2)
    for name in ("experts", "text", "kv"):
        lab.run_cell(panels, 3 + NAMES.index(name))
        alone(panels, name).wait_for(timeout=10_000)
    time.sleep(2)
    button(panels, "Pause").click()
    lab.until(lambda: lab.data(panels, "state") == "paused", 2, "pause")
    lab.settle(panels)
    alone(panels, "experts").locator("canvas").focus()
    panels.keyboard.press("ArrowRight")
    board = panels.locator(".jp-CodeCell").nth(1)
    for where in (board.locator(".cl-experts"), alone(panels, "experts")):
        where.locator(".cl-read", has_text="layer 0, expert 0: ").wait_for(timeout=1000)
    lab.until(lambda: "of this text went to it" in alone(panels, "text").inner_text(), 1, "another cell's words")
    assert "of this text went to it" in board.locator(".cl-prose").inner_text()
    panels.keyboard.press("Escape")
    lab.until(lambda: "layer 0, expert 0" not in board.locator(".cl-experts").inner_text(), 1, "nothing is pointed at")
