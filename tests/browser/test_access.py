"""The board without a mouse, without colours, and as tables: names, focus order, contrast, what a table says."""

from __future__ import annotations

import pytest

from colibri_lab.telemetry import Recorder
from tests.browser import lab
from tests.browser.test_board import shot
from tests.widgets.fake import FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
TABLES = ["Experts", "Time", "Text", "KV slots", "Latency", "Systems"]

# what one can do something with, in the order of the page
REACHED = """(board) => [...board.querySelectorAll("button, select, input, textarea, summary, canvas, [tabindex]")]
  .filter((n) => n.tabIndex >= 0 && !n.disabled && n.checkVisibility())"""

NAMELESS = (
    "(board) => ("
    + REACHED
    + """)(board).filter((n) => {
  const by = n.getAttribute("aria-labelledby"), labels = [...(n.labels || [])].map((l) => l.textContent).join("");
  const other = by && document.getElementById(by).textContent;
  return !(n.getAttribute("aria-label") || other || labels || n.textContent).trim();
}).map((n) => n.outerHTML.slice(0, 120))"""
)

# text whose contrast with what is behind it is below 4.5 (3 for large letters)
PALE = """(board) => {
  const channels = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = (top, below) => { const a = top[3] ?? 1; return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)); };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const own = channels(getComputedStyle(node).backgroundColor);
    if ((own[3] ?? 1) === 1) return own.slice(0, 3);
    return over(own, node.parentElement ? behind(node.parentElement) : [255, 255, 255]);
  };
  const wrong = [];
  const walk = document.createTreeWalker(board, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || !node.checkVisibility() || node.closest(":disabled") || style.fontSize === "0px") continue;
    const back = behind(node), [a, b] = [light(over(channels(style.color), back)), light(back)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 600);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (large ? 3 : 4.5)) wrong.push([text.data.slice(0, 30), ratio.toFixed(2)]);
  }
  return wrong;
}"""


@pytest.fixture()
def board(page, server, request, tmp_path):
    """A recorded run with every system on, without a model."""
    engine = FakeEngine(layers=8, experts=16, top_k=2, slots=256, all_systems=True)
    with Recorder(engine.telemetry, tmp_path / "run.jsonl", engine.describe()):
        engine.run(150)
    cell = f"import colibri_lab\nplayer = colibri_lab.replay({str(tmp_path / 'run.jsonl')!r})\nplayer"
    lab.open_notebook(page, server, server.notebook(f"access_{request.node.name}.ipynb", cell))
    lab.run_cell(page, 0)
    page.locator(f"{lab.BOARD}[data-draws]").wait_for()
    lab.settle(page)
    yield page
    assert lab.foreign(page) == []


def test_names_focus_order_and_contrast(board):
    root = board.locator(lab.BOARD)
    assert root.evaluate(NAMELESS) == []
    count = root.evaluate(f"(board) => ({REACHED})(board).length")
    root.evaluate(f"(board) => {{ board.order = ({REACHED})(board); board.order[0].focus(); }}")
    seen = []
    for _ in range(count):
        seen.append(root.evaluate("(board) => board.order.indexOf(document.activeElement)"))
        board.keyboard.press("Tab")
    assert seen == list(range(count)), "the keyboard goes through all controls as they stand on the page"
    for theme in ("Light", "Dark"):
        lab.command(board, "apputils:change-theme", theme=f"JupyterLab {theme}")
        board.locator(f"{lab.BOARD}[data-theme={theme.lower()}]").wait_for()
        for tab in ("Pages", "Router", "Compare", "What if", "Tuner"):
            board.get_by_role("tab", name=tab).click()
            board.wait_for_timeout(100)
            lab.until(lambda: root.evaluate(PALE) == [], f"all can be read: {theme}, {tab}")
    keys = board.locator(".cl-key:visible").all_inner_texts()
    assert keys and all(text.strip() for text in keys), "each colour of a legend has its words"


def test_every_picture_has_a_table(board):
    for name in TABLES:
        board.get_by_role("button", name=f"{name} as a table").click()
    tables = board.locator(".cl-scroll table")
    lab.until(lambda: all(text.strip() for text in tables.locator("caption").all_inner_texts()[:6]), "captions")
    assert board.locator(".cl-experts canvas").is_hidden()
    facts = tables.evaluate_all("""(all) => all.filter((t) => t.checkVisibility()).map((t) => ({
      rows: t.tBodies[0].rows.length, columns: [...t.tHead.rows[0].cells].every((c) => c.scope === "col"),
      named: [...t.tBodies[0].rows].every((r) => r.cells[0].tagName === "TH" && r.cells[0].scope === "row")}))""")
    assert len(facts) == len(TABLES) and all(f["columns"] and f["named"] and f["rows"] for f in facts), facts
    assert "layer 7" in tables.nth(0).inner_text() and "P99" in board.locator(".cl-latency table").inner_text()
    shot(board, "tables")
    region = board.get_by_role("region", name="Experts as a table")
    region.focus()
    board.keyboard.press("t")
    canvas = board.locator(".cl-experts canvas")
    lab.until(lambda: canvas.evaluate("(c) => document.activeElement === c"), "back to the picture, by keyboard")
    board.keyboard.press("t")
    lab.until(lambda: region.evaluate("(r) => document.activeElement === r"), "and to the table again")
