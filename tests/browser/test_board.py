"""What a person sees and does with the board in JupyterLab, on the real engine with the embedded model."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from colibri_lab.events import PageKind
from colibri_lab.telemetry import Recorder
from tests.browser import lab
from tests.widgets.fake import FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
IMPORT = "import colibri_lab\nmodel = colibri_lab.embedded_model()\n"
IMPORT += "engine = colibri_lab.load(model, pace=40, expert_cache_bytes='4MiB')"
SHOW = "lab = colibri_lab.connect(engine)\nlab"
ASK = "lab.generate('Mr. Darcy was', max_tokens=900, temperature=0.8, seed=3)"


@pytest.fixture()
def board(page, server, request):
    """A notebook whose first two cells ran: the engine is loaded, the board is there."""
    cells = [IMPORT, SHOW, ASK, "print('frames', lab.engine.counters()['pager']['frames'], lab.error)"]
    lab.open_notebook(page, server, server.notebook(f"{request.node.name}.ipynb", *cells))
    lab.show(page)
    yield page
    assert lab.foreign(page) == []


def shot(page, name: str, nth: int = 0, what=None) -> None:
    """A picture of a board, or of a part, kept where COLIBRI_SHOTS says (the pictures in docs/ are made so)."""
    folder = os.environ.get("COLIBRI_SHOTS")
    if folder:
        (what or page.locator(lab.BOARD).nth(nth)).screenshot(path=str(Path(folder) / f"{name}.png"))


def button(page, name: str):
    return page.locator(".cl-buttons button", has_text=name)


def generate(page, tokens: int = 0) -> None:
    """Runs the cell that asks, and waits until it is under way, by so many tokens of text."""
    lab.run_cell(page, 2)
    lab.until(lambda: lab.data(page, "state") == "generating", "generation starts")
    lab.until(lambda: page.locator(".cl-piece").count() >= tokens, f"{tokens} tokens")


@pytest.mark.alone
def test_first_view_and_rate(board):
    def first_view():
        board.evaluate(f"() => document.querySelectorAll('{lab.BOARD}').forEach((board) => board.remove())")
        lab.run_cell(board, 1)
        begin = time.monotonic()
        board.locator(f"{lab.BOARD}[data-draws]").wait_for()
        return time.monotonic() - begin

    lab.meets(first_view, lambda seconds: seconds < 3, "seconds to the first view")
    generate(board, 20)

    def rate():
        before, begin = [int(lab.data(board, name)) for name in ("updates", "draws")], time.monotonic()
        time.sleep(4)
        seconds = time.monotonic() - begin
        return min((int(lab.data(board, n)) - b) / seconds for n, b in zip(("updates", "draws"), before, strict=True))

    lab.meets(rate, lambda hz: hz >= 7, "pictures a second")
    lab.until(lambda: board.locator(".cl-piece").count() > 100, "text")


@pytest.mark.alone
def test_pause_resume_and_stop(board):
    generate(board, 20)

    def pause():
        if lab.data(board, "state") == "paused":
            button(board, "Resume").click()
            lab.until(lambda: lab.data(board, "state") == "generating", "it goes on")
        button(board, "Pause").click()
        return lab.until(lambda: lab.data(board, "state") == "paused", "pause")

    lab.meets(pause, lambda seconds: seconds < 0.5, "seconds until it is held")
    lab.settle(board)
    count = board.locator(".cl-piece").count()
    time.sleep(0.7)
    assert board.locator(".cl-piece").count() == count
    button(board, "Resume").click()
    lab.until(lambda: board.locator(".cl-piece").count() > count, "text goes on")
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "stop")
    board.locator("textarea").fill("def main")
    button(board, "Start").click()
    lab.until(lambda: lab.data(board, "state") == "generating", "start by button")
    lab.until(lambda: board.locator(".cl-prompt").inner_text() == "def main", "the new prompt is shown")


@pytest.mark.alone
def test_budget_slider_changes_the_engine_while_it_generates(board):
    generate(board, 10)
    memory = board.locator(".cl-tile-memory span")
    assert memory.inner_text() == "of 4.00 MiB"
    slider = board.get_by_label("experts in memory")

    def there_and_back():
        slider.press("End")
        up = lab.until(lambda: memory.inner_text() == "of 8.00 MiB", "all experts")
        slider.press("Home")
        return max(up, lab.until(lambda: memory.inner_text() == "of 128 KiB", "the engine's own budget changes"))

    lab.meets(there_and_back, lambda seconds: seconds < 1, "seconds until the engine has another budget")
    assert lab.data(board, "state") == "generating"
    lab.run_cell(board, 3)
    board.get_by_text("frames 2 None").wait_for()
    board.get_by_label("experts in memory").press("End")
    lab.until(lambda: memory.inner_text() == "of 8.00 MiB", "and back")


def test_same_pixels_after_save_and_reload_and_without_a_kernel(board, server, request):
    generate(board, 70)
    button(board, "Stop").click()
    lab.until(lambda: lab.data(board, "state") == "idle", "stop")
    lab.settle(board)
    before, words = lab.pixels(board), board.locator(".cl-text").inner_text()
    assert len(set(before)) == 7
    lab.command(board, "docmanager:save")
    board.wait_for_timeout(700)
    name = f"{request.node.name}.ipynb"
    lab.open_notebook(board, server, name)
    board.locator(f"{lab.BOARD}[data-draws]").wait_for()
    lab.settle(board)
    assert lab.pixels(board) == before
    assert board.locator(".cl-text").inner_text() == words
    assert board.locator(".cl-banner").first.is_hidden()
    lab.command(board, "kernelmenu:shutdown")
    board.wait_for_timeout(1000)
    board.goto("about:blank")
    lab.open_notebook(board, server, name)
    board.locator(f"{lab.BOARD}[data-draws]").wait_for()
    lab.settle(board)
    assert lab.pixels(board) == before
    assert board.locator(".cl-text").inner_text() == words
    board.get_by_text("this is the last picture").wait_for()
    assert button(board, "Start").is_disabled()


def test_kernel_restart_is_said(board):
    generate(board, 20)
    board.evaluate("() => { window.jupyterapp.commands.execute('kernelmenu:restart') }")
    board.locator(".jp-Dialog .jp-mod-accept").click()
    board.get_by_text("The kernel was restarted").wait_for()
    shot(board, "restarted")


def test_pointer_and_keyboard_say_what_is_there(board):
    generate(board, 70)
    button(board, "Pause").click()
    lab.until(lambda: lab.data(board, "state") == "paused", "pause")
    lab.settle(board)
    experts = board.locator(".cl-experts canvas")
    assert "8 layers of 16" in experts.get_attribute("aria-label")
    experts.hover(position={"x": 300, "y": 80})
    lab.says(board.locator(".cl-experts .cl-read"), "% of the last 64 tokens")
    board.mouse.move(2, 2)
    experts.focus()
    for key, at in (("ArrowRight", "0, expert 0"), ("ArrowRight", "0, expert 1"), ("ArrowDown", "1, expert 1")):
        board.keyboard.press(key)
        board.locator(".cl-experts .cl-read", has_text=f"layer {at}: ").wait_for()
    time_strip = board.locator(".cl-time canvas")
    time_strip.focus()
    board.keyboard.press("ArrowLeft")
    lab.until(lambda: "fault" in board.locator(".cl-time .cl-read").inner_text(), "the strip's words")
    lab.until(lambda: board.locator(".cl-piece.on").count() == 1, "its token is marked")
    board.keyboard.press("Escape")
    lab.until(lambda: board.locator(".cl-piece.on").count() == 0, "nothing is marked")
    assert board.locator(".cl-slots canvas").get_attribute("role") == "img"
    systems = board.locator(".cl-systems canvas").last
    systems.focus()
    board.keyboard.press("ArrowLeft")
    lab.until(lambda: "policy hits" in board.locator(".cl-say").inner_text(), "a moment's words")
    assert "P99" in board.locator(".cl-latency canvas").get_attribute("aria-label")


def test_tabs_of_the_systems_by_keyboard(board):
    generate(board, 40)
    chosen = board.locator(".cl-tabs [aria-selected=true]")
    assert chosen.inner_text() == "Pages"
    facts = board.locator(".cl-facts")
    lab.says(facts, "policy hits", "read from disk")
    chosen.focus()
    board.keyboard.press("ArrowRight")
    assert chosen.inner_text() == "Router · off"
    lab.says(board.locator(".cl-off"), "router_audit counts wrong selections")
    lab.until(board.locator(".cl-systems canvas").last.is_hidden, "no picture of what is off")
    board.keyboard.press("End")
    assert chosen.inner_text() == "Batch"
    lab.says(facts, "running now")
    assert chosen.evaluate("(tab) => document.activeElement === tab")
    assert board.locator(".cl-systems [role=tabpanel]").get_attribute("aria-labelledby") == chosen.get_attribute("id")
    lab.until(lambda: int(board.locator(".cl-systems canvas").last.evaluate("(c) => c.width")) > 300, "its picture")
    shot(board, "systems_batch")


def test_slots_are_coloured_by_sequence(board):
    generate(board, 40)
    legend = board.locator(".cl-slots .cl-legend")
    assert "expert" in legend.inner_text() and "own" not in legend.inner_text()
    board.get_by_label("what colours the slots").select_option("sequence")
    lab.until(lambda: "sequence 1: " in legend.inner_text(), "the legend names sequences")
    board.locator(".cl-slots canvas").hover(position={"x": 5, "y": 5})
    lab.until(lambda: "sequence 1" in board.locator(".cl-slots .cl-read").inner_text(), "and so does the readout")


def test_who_is_on_the_gpu_is_marked(page, server, request, tmp_path):
    """A recorded run whose experts travel: the legends of Experts and Pages, and the panel of the GPU."""
    engine = FakeEngine(layers=4, experts=8, top_k=2, slots=64, all_systems=True)
    with Recorder(engine.telemetry, tmp_path / "run.jsonl", engine.describe()):
        engine.run(60)
        for expert in range(3):
            engine.telemetry.page(11 * 10**8 + expert, PageKind.SENT, 1, expert, 1, 0, 60)
        engine.telemetry.page(11 * 10**8 + 9, PageKind.LEFT, 1, 2, 1, 0, 60)
    cells = [f"import colibri_lab\nplayer = colibri_lab.replay({str(tmp_path / 'run.jsonl')!r})\nplayer"]
    lab.open_notebook(page, server, server.notebook(f"{request.node.originalname}.ipynb", *cells))
    lab.run_cell(page, 0)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    legend = page.locator(".cl-experts .cl-legend")
    lab.until(lambda: "on the GPU 2" in legend.inner_text(), "two experts are on the GPU")
    lab.says(page.locator(".cl-pages .cl-legend").first, "on the GPU 2 (below)")
    page.locator(".cl-tabs").get_by_role("tab", name="GPU").click()
    facts = page.locator(".cl-facts")
    lab.until(lambda: "sent to the GPU" in facts.inner_text(), "the GPU has a panel")
    lab.says(facts, "tokens chosen there")
    shot(page, "gpu")


@pytest.mark.parametrize("width", [1000, 500])  # 500: a window of 1000 pixels at 200 %
def test_nothing_overlaps_on_a_small_screen(page, server, request, tmp_path, width):
    engine = FakeEngine(layers=32, experts=64, top_k=4, slots=2048, all_systems=True)
    with Recorder(engine.telemetry, tmp_path / "run.jsonl", engine.describe()):
        engine.run(120)
        engine.telemetry.note("batch", {"before": 8, "after": 4, "reason": "memory at 87 % of its limit"}, 11 * 10**8)
    cells = [f"import colibri_lab\nplayer = colibri_lab.replay({str(tmp_path / 'run.jsonl')!r})\nplayer"]
    lab.open_notebook(page, server, server.notebook(f"{request.node.originalname}{width}.ipynb", *cells))
    lab.run_cell(page, 0)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    page.locator(lab.BOARD).evaluate("(board, width) => { board.style.width = width + 'px' }", width)
    lab.settle(page)
    for tab in ("Pages", "Router", "KV cache", "Dispatch", "Batch", "GPU"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(100)
        assert page.evaluate(OVERLAPS) == []
        assert page.locator(".cl-facts dd", has_text="off").count() == 0
        shot(page, f"small_{width}_{tab.lower().replace(' ', '_')}")
    page.get_by_role("tab", name="Batch").click()
    lab.until(
        lambda: "memory at 87 %" in page.locator(".cl-systems canvas").last.get_attribute("aria-label"), "the change"
    )


# pairs of words that lie on each other, and what sticks out of its card
OVERLAPS = """() => {
  const seen = [...document.querySelectorAll(".cl-head > *, .cl-words, .cl-findings, .cl-key, .cl-facts dt, " +
    ".cl-facts dd, .cl-tile b, .cl-say")]
    .filter((n) => n.offsetWidth && n.textContent.trim()).map((n) => [n.textContent, n.getBoundingClientRect()]);
  const wrong = [];
  seen.forEach(([a, p], i) => seen.slice(i + 1).forEach(([b, q]) => {
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    if (across > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3) wrong.push([a, b]);
  }));
  const board = document.querySelector(".cl-board").getBoundingClientRect();
  for (const [a, p] of seen) if (p.right > board.right + 1) wrong.push([a, "past the edge"]);
  return wrong;
}"""


EVERYTHING = """import threading, colibri_lab
settings = dict(engine_mode="async", prefetcher="next_gate", router="two_stage", router_audit=True, pin_after_tokens=6)
settings |= dict(kv_cache_slot_size=16, expert_cache_bytes="4MiB", pace=40)
engine = colibri_lab.load(colibri_lab.embedded_model(), **settings)
lab = colibri_lab.connect(engine)
lab"""
OTHERS = """def also(prompt):
    list(engine.generate(prompt, max_tokens=900, temperature=0.8, seed=1))
for prompt in ("12 + 30 =", "def main", "The young lady"):
    threading.Thread(target=also, args=(prompt,), daemon=True).start()
lab.generate("Mr. Darcy was", max_tokens=900, temperature=0.8, seed=3)"""


def test_everything_on_in_light_and_dark(page, server, request):
    lab.open_notebook(page, server, server.notebook(f"{request.node.name}.ipynb", EVERYTHING, OTHERS))
    lab.run_cell(page, 0)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    lab.run_cell(page, 1)
    lab.until(lambda: lab.data(page, "state") == "generating", "generation starts")
    page.get_by_label("what colours the slots").select_option("sequence")
    page.get_by_role("tab", name="Dispatch").click()
    page.mouse.move(2, 2)
    if "COLIBRI_SHOTS" in os.environ:
        page.wait_for_timeout(7000)  # a picture with something in it
    lab.until(lambda: page.locator("[role=tab]", has_text="off").count() == 0, "every system has something to show")
    facts = page.locator(".cl-facts")
    for tab, words in (
        ("Router", "by certificate"),
        ("KV cache", "slots taken in pairs"),
        ("Dispatch", "reads hidden"),
    ):
        page.get_by_role("tab", name=tab).click()
        lab.until(lambda words=words: words in facts.inner_text(), words)
    page.set_viewport_size({"width": 1480, "height": 2000})  # the whole board in one picture
    colours = {}
    for theme in ("Light", "Dark"):
        lab.command(page, "apputils:change-theme", theme=f"JupyterLab {theme}")
        page.locator(f"{lab.BOARD}[data-theme={theme.lower()}]").wait_for()
        page.wait_for_timeout(800)
        style = "(el) => [getComputedStyle(el).color, getComputedStyle(el.querySelector('.cl-card')).backgroundColor]"
        colours[theme] = page.locator(lab.BOARD).evaluate(style)
        page.mouse.move(2, 2)
        shot(page, f"board_{theme.lower()}")
    assert colours["Light"] != colours["Dark"]
    assert lab.foreign(page) == []


def test_a_recorded_run_plays_without_an_engine(page, server, request, tmp_path):
    engine = FakeEngine(layers=24, experts=64, top_k=4, slots=2048)
    with Recorder(engine.telemetry, tmp_path / "run.jsonl", engine.describe()):
        engine.run(300)
    cells = [f"import colibri_lab\nplayer = colibri_lab.replay({str(tmp_path / 'run.jsonl')!r})\nplayer"]
    lab.open_notebook(page, server, server.notebook(f"{request.node.name}.ipynb", *cells))
    lab.run_cell(page, 0)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    assert lab.data(page, "state") == "recorded"
    assert "24 layers of 64" in page.locator(".cl-experts canvas").get_attribute("aria-label")
    count = 300
    lab.until(lambda: page.locator(".cl-piece").count() == count, "all of its text")
    page.get_by_label("speed").press("Home")
    button(page, "Play").click()
    lab.until(lambda: lab.data(page, "state") == "replay", "it plays")
    lab.until(lambda: 0 < page.locator(".cl-piece").count() < count, "from the beginning")
    button(page, "Stop").click()
    lab.until(lambda: page.locator(".cl-piece").count() == count, "to the end")
    shot(page, "replay")
    assert lab.foreign(page) == []


def test_a_missing_browser_names_the_package(monkeypatch):
    from tests.browser.conftest import find_browser

    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(pytest.fail.Exception, match="Debian package `chromium`"):
        find_browser()
