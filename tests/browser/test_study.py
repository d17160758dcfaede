"""The card under the systems: what a person does to compare runs, in JupyterLab, with the real engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser import lab
from tests.browser.test_board import ASK, IMPORT, OVERLAPS, SHOW, button, shot

SAID = "print([lab.engine.settings.prefill_chunk, lab.engine.settings.eviction_policy])"
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture()
def board(page, server, request):
    cells = [IMPORT.replace("pace=40", "pace=None"), SHOW, ASK.replace("900", "60")]
    cells += ["print(lab.runs, lab.error)", SAID, "lab.explore()"]
    lab.open_notebook(page, server, server.notebook(f"study_{request.node.name}.ipynb", *cells))
    lab.show(page)
    yield page
    assert lab.foreign(page) == []


def ended(page, runs: int) -> None:
    """Waits until so many runs of 60 tokens are over and shown; the first token of each comes from its prompt."""
    decoded = page.locator(".cl-latency .cl-sub")
    lab.until(lambda: decoded.inner_text().endswith(f" {59 * runs} tokens"), f"{runs} runs")
    lab.until(lambda: lab.data(page, "state") == "idle", "generation ends")


def test_keep_change_keep_and_compare(board):
    keep = board.get_by_role("button", name="Keep this run")
    assert keep.is_disabled()
    lab.run_cell(board, 2)
    ended(board, 1)
    keep.click()
    table = board.locator(".cl-compare table")
    lab.until(lambda: "tokens/s" in table.inner_text(), "A is shown")
    board.get_by_label("experts in memory").press("Home")
    button(board, "Start").click()
    ended(board, 2)
    name = board.locator(".cl-keep input")
    name.fill("two experts")
    name.press("Enter")
    verdict = board.locator(".cl-verdict")
    lab.until(lambda: "token by token" in verdict.inner_text(), "the same text from two experts of memory")
    lab.says(table, "two experts", "A better", "expert hits")
    shot(board, "compare")
    board.get_by_label("run A", exact=True).select_option("two experts")
    board.get_by_label("run B", exact=True).select_option("A")
    lab.until(lambda: "difference" in table.inner_text() and "A better" in table.inner_text(), "the other way round")
    board.get_by_role("button", name="Forget A").click()
    lab.until(lambda: board.locator(".cl-picks").is_hidden(), "one is left")
    lab.run_cell(board, 3)
    board.get_by_text("<kept runs: two experts: ").wait_for()


def test_what_if_curves_move_and_mark_the_engine(board):
    board.get_by_role("tab", name="What if").click()
    say = board.locator(".cl-whatif .cl-words")
    lab.says(say, "Start a run")
    lab.run_cell(board, 2)
    lab.until(lambda: "of the run" in say.inner_text(), "steps are counted")
    facts = board.locator(".cl-whatif .cl-figures")
    lab.until(lambda: "lfru" in facts.inner_text(), "rates are there")

    def figures():
        rows = facts.locator("div").all_inner_texts()
        return dict(row.split("\n") for row in rows if "\n" in row)  # not of one that is being written

    lab.until(lambda: "Belady" in figures() and "worked out" not in say.inner_text(), "all is worked out")
    lines = figures()
    assert lines["engine (lfru)"] == lines["lfru"] and lines["at the budget now"] == "64 experts"
    assert float(lines["Belady"][:-2]) > float(lines["lfru"][:-2])
    board.locator(".cl-whatif canvas").focus()
    board.keyboard.press("ArrowLeft")
    lab.until(lambda: "64 experts in memory, 50 %" in say.inner_text(), "the budget now in words")
    board.keyboard.press("ArrowLeft")
    lab.until(lambda: "51 experts in memory, 39.8" in say.inner_text(), "another budget in words")
    shot(board, "whatif")
    board.keyboard.press("Escape")
    picture = "(canvas) => canvas.toDataURL()"
    lab.until(lambda: "of the run" in say.inner_text(), "nothing is pointed at")
    first = board.locator(".cl-whatif canvas").evaluate(picture)
    button(board, "Start").click()
    ended(board, 2)
    lab.until(lambda: board.locator(".cl-whatif canvas").evaluate(picture) != first, "the curves move")


@pytest.mark.alone
def test_the_tuner_by_keyboard(board):
    board.get_by_role("tab", name="Compare").focus()
    board.keyboard.press("End")
    chunk, policy = board.get_by_label("prefill chunk"), board.get_by_label("eviction policy")
    lab.until(lambda: chunk.input_value() == "64" and policy.input_value() == "lfru", "the engine's values")
    wrong = board.locator(".cl-wrong:not([hidden])")
    chunk.focus()

    def says(text: str, refusals: int) -> float:
        board.keyboard.press("Control+A")
        board.keyboard.type(text)
        board.keyboard.press("Enter")
        return lab.until(lambda: wrong.count() == refusals, f"{text}: {refusals} refusals")

    says("4097", 1)
    lab.says(wrong, "prefill_chunk")
    assert chunk.get_attribute("aria-invalid") == "true"
    shot(board, "tuner")
    for _ in range(20):  # as fast as a hand can: what is told of an earlier value must not take back a later one
        says("32", 0)
        says("4097", 1)
        assert chunk.input_value() == "4097"
    within = "seconds until a setting is refused or taken"
    lab.meets(lambda: max(says("32", 0), says("4097", 1), says("32", 0)), lambda seconds: seconds < 1, within)
    policy.focus()
    board.keyboard.type("slru")
    lab.until(lambda: policy.input_value() == "slru", "chosen by its letters")
    budget = board.get_by_label("expert cache")
    memory = board.locator(".cl-tile-memory span")

    def set_budget(text: str) -> float:
        budget.fill(text)
        budget.press("Enter")
        return lab.until(lambda: memory.inner_text() == f"of {text.replace(' ', '.00 ')}", "the engine's own budget")

    within = "seconds until the engine has another budget"
    lab.meets(lambda: max(set_budget("2 MiB"), set_budget("1 MiB")), lambda seconds: seconds < 1, within)
    lab.run_cell(board, 4)
    board.get_by_text("[32, 'slru']").wait_for()


@pytest.mark.parametrize("width", [1000, 500])  # 500: a window of 1000 pixels at 200 %
def test_nothing_overlaps_on_a_small_screen(board, width):
    lab.run_cell(board, 2)
    ended(board, 1)
    for name in ("A", "a run with a name of forty characters xx"):
        board.locator(".cl-keep input").fill(name)
        board.get_by_role("button", name="Keep this run").click()
    board.locator(lab.BOARD).evaluate("(board, width) => { board.style.width = width + 'px' }", width)
    card = ".cl-study th, .cl-study td, .cl-study small, .cl-keep button, .cl-study label, .cl-study input, "
    card += ".cl-study select, .cl-wrong, .cl-verdict, "
    for theme in ("Light", "Dark"):
        lab.command(board, "apputils:change-theme", theme=f"JupyterLab {theme}")
        board.locator(f"{lab.BOARD}[data-theme={theme.lower()}]").wait_for()
        for tab in ("Compare", "What if", "Tuner"):
            board.get_by_role("tab", name=tab).click()
            board.wait_for_timeout(1500 if tab == "What if" else 300)
            looked = OVERLAPS.replace('querySelectorAll("', f'querySelectorAll("{card}')
            assert board.evaluate(looked) == [], tab
            shot(board, f"study_{width}_{theme.lower()}_{tab.lower().replace(' ', '_')}")


def test_explore_is_one_figure_that_stays_here(board):
    lab.run_cell(board, 2)
    ended(board, 1)
    lab.run_cell(board, 5)
    board.locator(".js-plotly-plot .bars path").first.wait_for()
    assert board.locator(".js-plotly-plot").count() == 1
    titles = board.locator(".modebar-btn").evaluate_all("(all) => all.map((b) => b.dataset.title)")
    assert "Zoom" in titles and not [title for title in titles if "loud" in title or "Studio" in title], titles
    if folder := os.environ.get("COLIBRI_SHOTS"):
        board.locator(".js-plotly-plot").screenshot(path=str(Path(folder) / "explore.png"))
