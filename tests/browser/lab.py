"""What a person does in JupyterLab, as functions over a playwright page."""

from __future__ import annotations

import time
from urllib.parse import urlparse

BOARD = ".cl-board"


def open_notebook(page, server, name: str) -> None:
    page.goto(f"{server.url}/lab/tree/{name}?token={server.token}&reset", wait_until="domcontentloaded")
    page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for(timeout=60_000)
    kernel_idle(page)


def kernel_idle(page, seconds: float = 60) -> None:
    page.get_by_text("| Idle").wait_for(timeout=seconds * 1000)


def ran(page, index: int, seconds: float = 60) -> None:
    """Waits until a cell has run to its end."""
    prompt = page.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputPrompt").nth(index)
    until(lambda: prompt.inner_text().strip("[]: \n").isdigit(), seconds, f"cell {index}")


def run_cell(page, index: int) -> None:
    dialog = page.locator("dialog.jp-Dialog")
    assert dialog.count() == 0, f"JupyterLab asks: {dialog.first.inner_text()}"
    page.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputArea-editor").nth(index).click()
    page.keyboard.press("Control+Enter")


def command(page, name: str, **arguments) -> None:
    page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])


def data(page, name: str) -> str:
    return page.locator(BOARD).first.get_attribute(f"data-{name}") or ""


def until(check, seconds: float, what: str) -> float:
    """Seconds until check() is true."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if check():
            return time.monotonic() - begin
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


def settle(page) -> None:
    """Waits until no new picture comes."""
    last, since = data(page, "updates"), time.monotonic()
    while time.monotonic() - since < 0.8:
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
