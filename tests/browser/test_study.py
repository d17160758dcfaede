"""The card under the systems: what a person does to compare runs, in JupyterLab, with the real engine."""

from __future__ import annotations

import pytest

from tests.browser import lab
from tests.browser.test_board import ASK, IMPORT, SHOW, button, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.fixture()
def board(page, server, request):
    cells = [IMPORT.replace("pace=40", "pace=None"), SHOW, ASK.replace("900", "60"), "print(lab.runs, lab.error)"]
    lab.open_notebook(page, server, server.notebook(f"study_{request.node.name}.ipynb", *cells))
    for cell in (0, 1):
        lab.run_cell(page, cell)
        lab.ran(page, cell)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for(timeout=20_000)
    yield page
    assert lab.foreign(page) == []


def run_to_its_end(page) -> None:
    before = int(lab.data(page, "updates"))
    button(page, "Start").click()
    lab.until(lambda: int(lab.data(page, "updates")) > before, 5, "generation starts")
    lab.until(lambda: page.locator(".cl-tile-state span").inner_text() == "60 of 60 tokens", 20, "60 tokens")
    lab.until(lambda: lab.data(page, "state") == "idle", 20, "generation ends")


def test_keep_change_keep_and_compare(board):
    keep = board.get_by_role("button", name="Keep this run")
    assert keep.is_disabled()
    lab.run_cell(board, 2)
    lab.ran(board, 2)
    lab.until(lambda: lab.data(board, "state") == "idle", 20, "generation ends")
    keep.click()
    table = board.locator(".cl-compare table")
    lab.until(lambda: "tokens/s" in table.inner_text(), 2, "A is shown")
    board.get_by_label("experts in memory").press("Home")
    run_to_its_end(board)
    name = board.locator(".cl-keep input")
    name.fill("two experts")
    name.press("Enter")
    verdict = board.locator(".cl-verdict")
    lab.until(lambda: "token by token" in verdict.inner_text(), 2, "the same text from two experts of memory")
    text = table.inner_text()
    assert "two experts" in text and "A better" in text and "expert hits" in text
    shot(board, "compare")
    board.get_by_label("run A", exact=True).select_option("two experts")
    board.get_by_label("run B", exact=True).select_option("A")
    lab.until(lambda: "difference" in table.inner_text() and "A better" in table.inner_text(), 2, "the other way round")
    board.get_by_role("button", name="Forget A").click()
    lab.until(lambda: board.locator(".cl-picks").is_hidden(), 2, "one is left")
    lab.run_cell(board, 3)
    board.get_by_text("<kept runs: two experts: ").wait_for(timeout=10_000)
