"""Time travel in JupyterLab: hold, scrub by pointer and keys, step, return, save, open what was saved."""

from __future__ import annotations

import re

import pytest

from tests.browser import lab
from tests.browser.test_board import ASK, IMPORT, OVERLAPS, SHOW, button, generate, shot

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
WHERE = "print('shown', lab.at, lab.shown.timeline.sampled, lab.error)"
OPEN = "player = colibri_lab.replay('seen.trace')\nplayer"


@pytest.fixture()
def board(page, server, request):
    cells = [IMPORT.replace("pace=40", "pace=25"), SHOW, ASK, WHERE, OPEN]
    lab.open_notebook(page, server, server.notebook(f"travel_{request.node.name}.ipynb", *cells))
    lab.show(page)
    yield page
    assert lab.foreign(page) == []


def words(page) -> str:
    return page.locator(".cl-when").first.inner_text()


def number(page) -> int:
    """Of the token that the time line names."""
    return int(re.search(r"(?:token|number) ([\d,]+)", words(page))[1].replace(",", ""))


def named(page, name: str):
    return page.locator(".cl-travel").first.get_by_role("button", name=name)


def test_hold_step_and_return_while_the_engine_goes_on(board):
    generate(board)
    lab.until(lambda: board.locator(".cl-piece").count() > 60, "some text")
    named(board, "Hold").click()
    lab.until(lambda: "before the newest" in words(board), "the picture is held")
    pictures = lab.at_rest(board)
    assert lab.data(board, "state") == "generating", "the engine goes on"
    at, count = number(board), board.locator(".cl-piece").count()
    board.wait_for_timeout(700)
    assert number(board) == at and board.locator(".cl-piece").count() == count
    assert lab.pixels(board) == pictures, "nothing moves"
    lab.says(board.locator(".cl-tile-state b"), "held")
    for name, by in (("one token back", -1), ("one token back", -2), ("one token on", -1)):
        named(board, name).click()
        lab.until(lambda by=by: number(board) == at + by, f"{name}: {by}")
    lab.until(lambda: board.locator(".cl-piece").count() == count - 1, "the text is that of the moment")
    lab.until(lambda: lab.pixels(board) != pictures, "so are the pictures")
    shot(board, "travel_held")
    lab.run_cell(board, 3)
    board.get_by_text(f"shown {at - 1} {at} None").wait_for()
    named(board, "Live").click()
    lab.until(lambda: board.locator(".cl-piece").count() > count, "back to the newest")
    lab.until(lambda: words(board).startswith("newest token"), "the time line says so")
    before = number(board)
    lab.until(lambda: number(board) > before, "and it moves again")


def test_scrub_by_pointer_and_by_keys(board):
    generate(board)
    lab.until(lambda: board.locator(".cl-piece").count() > 80, "some text")
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "stop")
    lab.settle(board)
    whole, last, all_of_it = lab.pixels(board), number(board), board.locator(".cl-text").inner_text()
    slider = board.get_by_label("token that the board shows")
    box = slider.bounding_box()
    board.mouse.move(box["x"] + box["width"] - 8, box["y"] + 9)
    board.mouse.down()
    seen = []
    for share in (0.8, 0.6, 0.4, 0.2):
        board.mouse.move(box["x"] + share * box["width"], box["y"] + 9, steps=3)
        lab.until(lambda share=share: abs(number(board) - share * last) < 0.06 * last + 2, f"at {share}")
        seen.append(number(board))
    board.mouse.up()
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 4
    lab.until(lambda: int(slider.input_value()) == number(board), "the board is where the pointer was last")
    lab.until(lambda: f"of {last}" in slider.get_attribute("aria-valuetext"), "said to those who cannot see")
    board.wait_for_timeout(600)
    slider.focus()
    here = number(board)
    for key, there in (
        ("ArrowRight", here + 1),
        ("ArrowLeft", here),
        ("ArrowLeft", here - 1),
        ("Home", 0),
        ("End", last),
    ):
        board.keyboard.press(key)
        lab.until(lambda there=there: number(board) == there, key)
    named(board, "one token back").click()
    lab.until(lambda: board.locator(".cl-text").inner_text() != all_of_it, "a token earlier")
    slider.focus()
    board.keyboard.press("Escape")
    lab.until(lambda: words(board).startswith("newest token"), "Escape returns")
    lab.settle(board)
    assert lab.pixels(board) == whole and board.locator(".cl-text").inner_text() == all_of_it
    ticks = board.locator(".cl-ticks i.start")
    lab.until(lambda: ticks.count() == 1, "a mark where the request begins")
    assert "request 1 begins at token 0" in ticks.first.get_attribute("title")


def test_save_and_open_without_the_model(board):
    generate(board)
    lab.until(lambda: board.locator(".cl-piece").count() > 60, "some text")
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "stop")
    lab.settle(board)
    name = board.locator(".cl-file input")
    assert name.get_attribute("placeholder") == "run-1.trace"
    name.fill("seen.trace")
    name.press("Enter")
    board.get_by_text("saved seen.trace, ").wait_for()
    live = board.locator(lab.BOARD).first
    pictures, said = lab.pixels(board), live.locator(".cl-text").inner_text()
    lab.run_cell(board, 4)
    opened = board.locator(lab.BOARD).nth(1)
    opened.locator(".cl-piece").first.wait_for()
    lab.until(lambda: opened.get_attribute("data-state") == "recorded", "a board of what was saved")
    lab.until(lambda: opened.locator(".cl-text").inner_text() == said, "the same text")
    draw = "(board) => [...board.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    lab.until(lambda: opened.evaluate(draw) == pictures, "the same pictures, to the pixel")
    slider = opened.get_by_label("token that the board shows")
    slider.focus()
    board.keyboard.press("Home")
    lab.until(lambda: "token 0 of" in opened.locator(".cl-when").inner_text(), "the first token")
    lab.until(lambda: opened.get_attribute("data-state") == "paused", "it is held there")
    lab.until(lambda: opened.locator(".cl-piece").count() == 1, "with one token of text")
    shot(board, "travel_opened", 1)
    opened.get_by_label("speed").press("Home")
    opened.locator(".cl-buttons button", has_text="Resume").click()
    lab.until(lambda: opened.locator(".cl-piece").count() > 5, "it plays on from there")
    opened.locator(".cl-travel").get_by_role("button", name="Hold").click()
    lab.until(lambda: opened.get_attribute("data-state") == "paused", "and is held")
    opened.locator(".cl-travel").get_by_role("button", name="To the end").click()
    lab.until(lambda: opened.get_attribute("data-state") == "recorded", "to the end")
    lab.until(lambda: opened.locator(".cl-text").inner_text() == said, "all of the text again")


@pytest.mark.parametrize("width", [1000, 500])
def test_the_time_line_on_a_small_screen(board, width):
    generate(board)
    lab.until(lambda: board.locator(".cl-piece").count() > 30, "some text")
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "stop")
    button(board, "Start").click()
    lab.until(lambda: lab.data(board, "state") == "generating", "another one")
    board.wait_for_timeout(1500)
    named(board, "Hold").click()
    board.locator(".cl-file input").fill(f"a {width}.trace")
    board.locator(".cl-file input").press("Enter")
    board.get_by_text(f"saved a {width}.trace").wait_for()
    board.locator(lab.BOARD).evaluate("(board, width) => { board.style.width = width + 'px' }", width)
    looked = OVERLAPS.replace(
        'querySelectorAll("', 'querySelectorAll(".cl-travel button, .cl-when, .cl-saved, .cl-file > *, '
    )
    for theme in ("Light", "Dark"):
        lab.command(board, "apputils:change-theme", theme=f"JupyterLab {theme}")
        board.locator(f"{lab.BOARD}[data-theme={theme.lower()}]").wait_for()
        board.wait_for_timeout(400)
        assert board.evaluate(looked) == []
        shot(board, f"travel_{width}_{theme.lower()}")


def test_click_on_a_token(board):
    board.get_by_role("tab", name="Tuner").click()
    field = board.get_by_label("telemetry top logprobs")
    field.fill("4")
    field.press("Enter")
    generate(board)
    lab.until(lambda: board.locator(".cl-piece").count() > 40, "some text")
    panel = board.locator(".cl-token")
    assert panel.is_hidden()
    piece = board.locator(".cl-piece").nth(20)
    words_of_it = piece.inner_text()
    piece.click()
    lab.until(panel.is_visible, "the token's panel")
    assert words_of_it.strip() in panel.locator(".cl-head b").inner_text()
    assert panel.locator(".cl-route tr").count() == 8 and panel.locator(".cl-route td").count() == 16
    assert panel.locator(".cl-odds tr").count() in (4, 5)
    assert panel.locator(".cl-odds tr.on").count() == 1, "the one that was chosen"
    lab.says(panel, "attention", "expert faults")
    lab.until(lambda: board.locator(".cl-chosen").count() == 1, "it is marked in the text")
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "stop")
    for theme in ("Light", "Dark"):
        lab.command(board, "apputils:change-theme", theme=f"JupyterLab {theme}")
        board.locator(f"{lab.BOARD}[data-theme={theme.lower()}]").wait_for()
        board.wait_for_timeout(400)
        shot(board, f"token_{theme.lower()}")
    board.mouse.move(2, 2)  # what the pointer marks is where the keys begin
    board.locator(".cl-text").focus()
    for key in ("ArrowLeft", "ArrowLeft", "Enter"):
        board.keyboard.press(key)
    last = board.locator(".cl-piece").nth(-2).inner_text()
    lab.until(lambda: last.strip() in panel.locator(".cl-head b").inner_text(), "another one, by keyboard")
    panel.get_by_role("button", name="Show this moment").click()
    lab.until(lambda: words(board).startswith("token "), "the board goes there")
    lab.until(lambda: f"number {number(board):,}" in panel.locator(".cl-sub").first.inner_text(), "to that token")
    board.locator(".cl-text").focus()
    board.keyboard.press("Escape")
    lab.until(panel.is_hidden, "Escape closes it")
