"""Panels that stand alone in cells of a notebook, and what is pointed at in one of them marked in all."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.browser import lab
from tests.browser.servers import TOP
from tests.browser.test_board import ASK, IMPORT, SHOW, button, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
NAMES = "experts pages kv latency stages text tuner whatif router".split()
KINDS = dict(zip(NAMES, "experts systems slots latency time prose study study systems".split(), strict=True))


@pytest.fixture()
def panels(page, server, request):
    """A notebook with the engine, the board and each panel in a cell of its own."""
    page.set_viewport_size({"width": 1400, "height": 6400})  # JupyterLab draws what is in sight
    slowly = IMPORT.replace("pace=40", "pace=16")  # 900 tokens last for a minute
    cells = [slowly, SHOW, ASK, *(f"lab.{name}" for name in NAMES)]
    cells.append("print(len(lab.text), lab.text[:3], len(lab.board._alone), lab.error)")
    lab.open_notebook(page, server, server.notebook(f"panels_{request.node.name}.ipynb", *cells))
    lab.show(page)
    yield page
    assert lab.foreign(page) == []


def alone(page, name: str):
    """The panel that cell `lab.name` shows."""
    return page.locator(".jp-CodeCell").nth(3 + NAMES.index(name)).locator(f".cl-alone .cl-{KINDS[name]}")


def test_every_panel_stands_alone_and_live(panels):
    for i, name in enumerate(NAMES):
        lab.run_cell(panels, 3 + i)
        alone(panels, name).wait_for()
    lab.run_cell(panels, 2)
    assert panels.locator(".cl-alone").count() == len(NAMES)
    words = alone(panels, "latency").locator(".cl-sub")
    before = words.inner_text()
    lab.until(lambda: words.inner_text() != before, "the panel moves")
    lab.until(lambda: alone(panels, "text").locator(".cl-piece").count() > 20, "the text's panel writes")
    lab.until(lambda: alone(panels, "router").locator(".cl-off").inner_text().startswith("off: "), "what is off")
    facts = alone(panels, "pages").locator(".cl-facts")
    lab.until(lambda: facts.inner_text().startswith("policy hits"), "the figures of the pages")
    lab.until(lambda: "of the run" in alone(panels, "whatif").inner_text(), "somebody looks at the what-if")
    alone(panels, "tuner").get_by_label("prefill chunk").fill("17")
    alone(panels, "tuner").get_by_label("prefill chunk").press("Enter")
    board = panels.locator(".jp-CodeCell").nth(1)
    board.get_by_role("tab", name="Tuner").click()
    lab.until(lambda: board.get_by_label("prefill chunk").input_value() == "17", "the board shows the panel's change")
    button(panels, "Pause").click()
    lab.settle(panels)
    for name in NAMES:
        panel = alone(panels, name)
        if name != "router" and panel.locator("canvas").count():
            picture = panel.locator("canvas").first
            lab.until(lambda picture=picture: picture.evaluate("(c) => c.width") > 200, name)
    shot_all(panels, "alone")


def shot_all(page, name: str) -> None:
    shot(page, name + "_board")
    for one in NAMES:
        shot(page, f"{name}_{one}", what=alone(page, one))


def test_what_is_pointed_at_in_a_cell_is_marked_in_all(panels):
    lab.run_cell(panels, 2)
    for name in ("experts", "text", "kv"):
        lab.run_cell(panels, 3 + NAMES.index(name))
        alone(panels, name).wait_for()
    lab.until(lambda: alone(panels, "text").locator(".cl-piece").count() > 70, "some text")
    button(panels, "Pause").click()
    lab.until(lambda: lab.data(panels, "state") == "paused", "pause")
    lab.settle(panels)
    alone(panels, "experts").locator("canvas").focus()
    panels.keyboard.press("ArrowRight")
    board = panels.locator(".jp-CodeCell").nth(1)
    for where in (board.locator(".cl-experts"), alone(panels, "experts")):
        where.locator(".cl-read", has_text="layer 0, expert 0: ").wait_for()
    lab.until(lambda: "of this text went to it" in alone(panels, "text").inner_text(), "another cell's words")
    lab.says(board.locator(".cl-prose"), "of this text went to it")
    panels.keyboard.press("Escape")
    lab.until(lambda: "layer 0, expert 0" not in board.locator(".cl-experts").inner_text(), "nothing is pointed at")


def test_layers_experts_and_slots_say_more_by_keyboard(panels):
    lab.run_cell(panels, 2)
    lab.until(lambda: panels.locator(".cl-piece").count() > 70, "some text")
    button(panels, "Pause").click()
    lab.until(lambda: lab.data(panels, "state") == "paused", "pause")
    lab.settle(panels)
    experts, words = panels.locator(".cl-experts canvas"), panels.locator(".cl-experts .cl-read")
    experts.focus()
    panels.keyboard.press("ArrowRight")
    lab.until(lambda: "fault" in words.inner_text(), "the kernel tells more of an expert")
    pages = panels.locator(".cl-pages .cl-words").first
    lab.says(pages, "of 1 page in memory", "fault")
    panels.keyboard.press("ArrowLeft")
    lab.until(lambda: words.inner_text().startswith("layer 0: "), "left of the first expert is the layer")
    lab.says(words, "% of all")
    lab.says(pages, "of 16 pages in memory")
    lab.says(panels.locator(".cl-slots .cl-read"), "slots of this layer")
    lab.says(panels.locator(".cl-prose .cl-read"), "of layer 0 were first")
    panels.keyboard.press("s")
    sort = panels.get_by_role("button", name="sort by load")
    lab.until(lambda: sort.get_attribute("aria-pressed") == "true", "sorted by load")
    panels.keyboard.press("ArrowRight")
    lab.until(lambda: words.inner_text().startswith("layer 0, expert "), "the busiest of the layer")
    shot(panels, "sorted")
    panels.locator(".cl-slots canvas").focus()
    panels.keyboard.press("ArrowRight")
    slot = panels.locator(".cl-slots .cl-read")
    lab.until(lambda: "sequence 1, expert" in slot.inner_text() and " tokens" in slot.inner_text(), "a slot's owner")
    lab.says(panels.locator(".cl-prose .cl-read"), "went to its owner first")
    panels.locator(".cl-latency canvas").focus()
    for _ in range(4):
        panels.keyboard.press("ArrowRight")
    lab.until(lambda: "took so long" in panels.locator(".cl-time .cl-read").inner_text(), "tokens of a latency")


ANSWERS = """curves, column = lab.whatif, lab.whatif.x.index(50.0)
ours = {name: values[column] for name, values in curves.lines.items() if "Belady" not in name}
layers = lab.view.experts.faults.sum(axis=1)
print("ANSWERS", layers.argmax(), lab.view.timeline.latency().p99, max(ours, key=ours.get))"""


def test_three_questions_after_make_lab(page, server):
    """The clicks of docs/first_minutes.md: into the notebook, six times Shift+Enter, one tab."""
    book = nbformat.read(TOP / "notebooks" / "00_quickstart.ipynb", 4)
    book.cells.append(nbformat.v4.new_code_cell(ANSWERS))
    nbformat.write(book, server.notebooks / "first_minutes.ipynb")
    lab.open_notebook(page, server, "first_minutes.ipynb")
    page.locator(".jp-Notebook .jp-MarkdownCell").first.click()
    for _ in range(6):
        page.keyboard.press("Shift+Enter")
    says = page.locator(".cl-findings")
    lab.until(lambda: lab.data(page, "state") == "generating", "the board moves")
    lab.until(lambda: lab.data(page, "state") == "idle", "the text is whole")
    lab.says(says, "faults most", "(P99)")
    page.get_by_role("tab", name="What if").click()
    lab.until(lambda: "At this budget" in says.inner_text(), "the policies are compared")
    words = says.inner_text()  # now: what is scrolled out of sight is not laid out
    shot(page, "first_minutes")
    lab.run_cell(page, sum(cell.cell_type == "code" for cell in book.cells) - 1)
    said = page.get_by_text(re.compile(r"^ANSWERS \d")).last  # what was printed, not the cell's own text
    said.wait_for()
    _, layer, p99, policy = said.inner_text().split()
    assert words.startswith(f"Layer {layer} faults most: ")
    value, unit = re.search(r"longer than ([\d.]+) (µs|ms) \(P99\)", words).groups()
    assert float(value) * {"µs": 1e-3, "ms": 1}[unit] == pytest.approx(float(p99), rel=0.01)
    assert f"At this budget {policy} would have hit most" in words or f"more than {policy}: " in words
