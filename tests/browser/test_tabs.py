"""More than one page, none, a kernel that starts anew, and a person without a mouse."""

from __future__ import annotations

import ast
import json
import time

import pytest

from tests.browser import lab
from tests.browser.test_board import ASK, IMPORT, SHOW, button, generate, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture()
def board(page, server, request):
    slowly = IMPORT.replace("pace=40", "pace=16")  # 900 tokens last for a minute
    page.book = server.notebook(f"{request.node.name}.ipynb", slowly, SHOW, ASK)
    lab.open_notebook(page, server, page.book)
    lab.show(page)
    yield page
    assert lab.foreign(page) == []


def test_two_tabs_show_the_same_and_both_react(board, server):
    lab.command(board, "docmanager:save")
    board.wait_for_timeout(500)
    other = board.context.new_page()
    lab.open_notebook(other, server, board.book)
    other.locator(f"{lab.BOARD}[data-draws]").wait_for()
    other.locator(".cl-controls textarea").fill("The young lady")
    button(other, "Start").click()
    for tab in (board, other):
        lab.until(lambda tab=tab: lab.data(tab, "state") == "generating", "both see it start")
    button(board, "Pause").click()
    for tab in (board, other):
        lab.until(lambda tab=tab: lab.data(tab, "state") == "paused", "both see it held")
        lab.settle(tab)
        lab.says(tab.locator(".cl-prompt"), "The young lady")
    assert board.locator(".cl-text").inner_text() == other.locator(".cl-text").inner_text()
    words = [
        tab.locator(".cl-board canvas").evaluate_all("(all) => all.map((c) => c.ariaLabel)") for tab in (board, other)
    ]
    assert words[0] == words[1]
    for one, two, label in zip(lab.pixels(board), lab.pixels(other), words[0], strict=True):
        assert one == two or label.startswith("Pages: "), label  # there faults glow, as long as a page has seen them
    other.get_by_label("experts in memory").press("Home")
    memory = board.locator(".cl-tile-memory span")
    lab.until(lambda: memory.inner_text() == "of 128 KiB", "what one tab sets the other shows")
    shot(other, "second_tab")
    other.close()
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "the first tab goes on without the second")


def test_a_restarted_kernel_and_the_cell_again(board):
    generate(board, 1)
    board.evaluate("() => { window.jupyterapp.commands.execute('kernelmenu:restart') }")
    board.locator(".jp-Dialog .jp-mod-accept").click()
    board.get_by_text("The kernel was restarted").wait_for()
    assert board.locator(".cl-piece").count() > 0, "the last picture stays"
    lab.kernel_idle(board)
    lab.show(board)
    lab.until(lambda: board.locator(lab.BOARD).count() == 1, "the new board has the old one's place")
    lab.until(board.locator(".cl-banner").first.is_hidden, "the kernel is there")
    assert board.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    generate(board)
    lab.until(lambda: board.locator(".cl-piece").count() > 10, "it writes again")
    shot(board, "restarted_again")


def test_from_start_to_stop_by_keyboard(board):
    """Focus enters the board once; from there Tab, arrows, Space and letters do everything."""
    board.locator(".cl-board canvas").first.focus()
    lab.tab_to(board, "Prompt")
    board.keyboard.press("Control+A")
    board.keyboard.type("def main")
    lab.tab_to(board, "Start")
    ring = "() => getComputedStyle(document.activeElement).outlineStyle"
    assert board.evaluate(ring) != "none", "one sees where the focus is"
    board.keyboard.press("Enter")
    lab.until(lambda: lab.data(board, "state") == "generating", "started")
    lab.tab_to(board, "Pause")
    board.keyboard.press("Space")
    lab.until(lambda: lab.data(board, "state") == "paused", "held")
    lab.until(lambda: "Resume" in lab.focused(board), "the focus stays on the button, which now goes on")
    board.keyboard.press("Space")
    lab.until(lambda: lab.data(board, "state") == "generating", "goes on")
    lab.tab_to(board, "experts in memory")
    board.keyboard.press("Home")
    memory = board.locator(".cl-tile-memory span")
    lab.until(lambda: memory.inner_text() == "of 128 KiB", "the engine's budget")
    shot(board, "keyboard")
    board.keyboard.press("Shift+Tab")
    lab.until(lambda: "Stop" in lab.focused(board), "and back")
    board.keyboard.press("Enter")
    lab.until(lambda: lab.data(board, "state") == "idle", "stopped")
    lab.says(board.locator(".cl-prompt"), "def main")
    assert board.locator(".jp-CodeCell").count() == 3, "no key went to the notebook"


@pytest.mark.alone
def test_hz_from_1_to_10_and_nothing_for_nobody(board, server):
    generate(board)

    def pictures() -> float:
        board.wait_for_timeout(1200)
        before, begin = int(lab.data(board, "updates")), time.monotonic()
        board.wait_for_timeout(3000)
        return (int(lab.data(board, "updates")) - before) * 3 / (time.monotonic() - begin)

    for hz, least, most in ((1, 2, 5), (10, 20, 34)):
        lab.ask_kernel(server, board.book, f"setattr(lab.board, 'hz', {hz})")
        bar = lambda got, least=least, most=most: least <= got <= most  # noqa: E731
        lab.meets(pictures, bar, f"{hz} Hz: pictures in 3 s", tries=3)
    board.goto("about:blank")

    def look():
        return ast.literal_eval(lab.ask_kernel(server, board.book, "(lab.state, lab.board.updates, lab.view.events)"))

    def nobody() -> bool:
        state, updates, events = look()
        assert state == "generating"
        board.wait_for_timeout(1500)
        _, later, more = look()
        return later == updates and more > events

    lab.until(nobody, "for nobody no picture is made, but events are followed")
    lab.open_notebook(board, server, board.book)


def test_running_the_cell_again_adds_nothing_to_the_notebook(board, server):
    """What JupyterLab saves of widgets is that of one board, however often its cell ran."""
    sizes = []
    prompt = board.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputPrompt").nth(1)
    for run in range(20):
        lab.run_cell(board, 1)
        lab.until(lambda run=run: prompt.inner_text().strip("[]: \n") == str(run + 3), f"run {run}")
        if run in (1, 19):
            lab.until(lambda: board.locator(f"{lab.BOARD}[data-draws]").count() == 1, "one board")
            lab.settle(board)
            lab.command(board, "docmanager:save")
            board.wait_for_timeout(700)
            saved = json.loads((server.notebooks / board.book).read_text())
            sizes.append((len(saved["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]),
                          (server.notebooks / board.book).stat().st_size))  # fmt: skip
    assert sizes[0][0] == sizes[1][0], "as many models"
    assert abs(sizes[0][1] - sizes[1][1]) < 0.02 * sizes[0][1], sizes
