"""What a person does in JupyterLab, as functions over a playwright page."""

from __future__ import annotations

import json
import time
import urllib.request
from urllib.parse import urlparse

from jupyter_client.blocking.client import BlockingKernelClient

BOARD = ".cl-board"
PATIENCE_S = 60


def open_notebook(page, server, name: str) -> None:
    page.goto(f"{server.url}/lab/tree/{name}?token={server.token}&reset", wait_until="domcontentloaded")
    page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for()
    kernel_idle(page)


def kernel_idle(page) -> None:
    page.get_by_text("| Idle").wait_for()


def ran(page, index: int) -> None:
    """Waits until a cell has run to its end."""
    prompt = page.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputPrompt").nth(index)
    until(lambda: prompt.inner_text().strip("[]: \n").isdigit(), f"cell {index}")


def run_cell(page, index: int) -> None:
    dialog = page.locator("dialog.jp-Dialog")
    assert dialog.count() == 0, f"JupyterLab asks: {dialog.first.inner_text()}"
    page.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputArea-editor").nth(index).click()
    page.keyboard.press("Control+Enter")


def show(page) -> None:
    """Runs the first two cells, which load an engine and show its board."""
    for cell in (0, 1):
        run_cell(page, cell)
        ran(page, cell)
    page.locator(f"{BOARD}[data-draws]").last.wait_for()


def command(page, name: str, **arguments) -> None:
    page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])


def data(page, name: str) -> str:
    return page.locator(BOARD).first.get_attribute(f"data-{name}") or ""


def until(check, what: str) -> float:
    """Seconds until check() is true. How long that may take at most is not a bar: a busy machine passes."""
    begin = time.monotonic()
    while time.monotonic() - begin < PATIENCE_S:
        if check():
            return time.monotonic() - begin
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {PATIENCE_S} s")


def says(where, *words: str) -> None:
    """Waits until an element's text has all these words: pictures come with the next animation frame."""
    until(lambda: all(one in where.inner_text() for one in words), f"it says {words}")


def at_rest(page) -> list[str]:
    """The pixels, once they stay as they are: also while the engine goes on, which `settle` would wait for."""
    seen = [pixels(page)]

    def same() -> bool:
        page.wait_for_timeout(700)
        seen.append(pixels(page))
        return seen[-1] == seen[-2]

    until(same, "nothing moves")
    return seen[-1]


def meets(measure, bar, what: str, tries: int = 5) -> None:
    """Asserts that one of some tries meets the bar: what else the machine does must not decide."""
    seen = []
    for _ in range(tries):
        seen.append(measure())
        if bar(seen[-1]):
            return
    raise AssertionError(f"{what}: {', '.join(f'{value:.2f}' for value in seen)}")


def settle(page) -> None:
    """Waits until no new picture comes."""
    last, since = data(page, "updates"), time.monotonic()
    while time.monotonic() - since < 1.2:
        if (now := data(page, "updates")) != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)


def pixels(page) -> list[str]:
    return page.evaluate("() => [...document.querySelectorAll('.cl-board canvas')].map((c) => c.toDataURL())")


def foreign(page) -> list[str]:
    """Requests that went anywhere but to this machine."""
    here = ("127.0.0.1", "localhost", None)
    web = [urlparse(url) for url in page.hosts if url.startswith(("http", "ws"))]
    return [url.geturl() for url in web if url.hostname not in here]


def focused(page) -> str:
    """What a screen reader calls the element that has the focus."""
    return page.evaluate("""() => {
      const node = document.activeElement, label = node.labels && node.labels[0];
      return (node.getAttribute("aria-label") || (label ? label.textContent : node.textContent) || "").trim();
    }""")


def tab_to(page, name: str, most: int = 60) -> None:
    """Presses Tab until what is called so has the focus."""
    passed = []
    for _ in range(most):
        if name in (now := focused(page)):
            return
        passed.append(now[:30])
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not come to {name!r}, only to {passed}")


def ask_kernel(server, notebook: str, expression: str) -> str:
    """The repr of an expression in the notebook's kernel, by a client beside the page."""
    with urllib.request.urlopen(f"{server.url}/api/sessions?token={server.token}") as answer:
        (kernel,) = [s["kernel"]["id"] for s in json.load(answer) if s["path"] == notebook]
    client = BlockingKernelClient(connection_file=str(server.folder / "jupyter_runtime_dir" / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels()
    try:
        asked = client.execute("", silent=True, user_expressions={"asked": expression})
        while (reply := client.get_shell_msg(timeout=PATIENCE_S))["parent_header"].get("msg_id") != asked:
            continue
    finally:
        client.stop_channels()
    told = reply["content"]["user_expressions"]["asked"]
    assert told["status"] == "ok", told
    return told["data"]["text/plain"]
