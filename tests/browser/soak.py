"""`make soak`: the lab in JupyterLab, generating again and again at 8 Hz, and what kernel and page grow by.

    python -m tests.browser.soak --minutes 30

Every half minute the kernel's memory and the page's JavaScript heap after a collection are noted. Growth is counted
from the end of the warm-up, in which rings and histories fill. Exit code 1 where one of them grew by 20 MB or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from tests.browser import lab
from tests.browser.conftest import FLAGS, find_browser
from tests.browser.servers import Server

MOST_MB, EVERY_S, MB = 20, 30, 1e6
WARM_UP = 0.2  # of the whole time, at most five minutes
CELLS = [
    "import colibri_lab\nengine = colibri_lab.load(colibri_lab.embedded_model(), expert_cache_bytes='4MiB', pace=80)",
    "lab = colibri_lab.connect(engine, hz=8)\nlab",
    "lab.generate('Mr. Darcy was', max_tokens=400, temperature=0.9)",
]
COLUMNS = ("minute", "tokens", "updates", "kernel RSS", "kernel PSS", "page heap", "page nodes")


def kernel_of(server: Server) -> psutil.Process:
    (found,) = [p for p in psutil.Process(server.process.pid).children() if "ipykernel_launcher" in p.cmdline()]
    return found


class Page:
    """The notebook's page: starts a generation when the last has ended, and says what it weighs."""

    def __init__(self, browser, server: Server) -> None:
        self.page = browser.new_page(viewport={"width": 1480, "height": 1500})
        self.devtools = self.page.context.new_cdp_session(self.page)
        self.devtools.send("Performance.enable")
        lab.open_notebook(self.page, server, server.notebook("soak.ipynb", *CELLS))
        for cell in range(len(CELLS)):
            lab.run_cell(self.page, cell)
            lab.ran(self.page, cell)
        self.runs = 1

    def go_on(self) -> None:
        if lab.data(self.page, "state") == "idle":
            self.page.locator(".cl-buttons button", has_text="Start").click()
            lab.until(lambda: lab.data(self.page, "state") == "generating", "the next generation")
            self.runs += 1

    def weighs(self) -> tuple[float, int]:
        """(MB of JavaScript heap after a collection, nodes of the document)."""
        for _ in range(2):
            self.devtools.send("HeapProfiler.collectGarbage")
        told = {m["name"]: m["value"] for m in self.devtools.send("Performance.getMetrics")["metrics"]}
        return told["JSHeapUsedSize"] / MB, int(told["Nodes"])


def soak(minutes: float, page: Page, kernel: psutil.Process) -> list[tuple[float, ...]]:
    """Rows of COLUMNS, one each half minute."""
    rows: list[tuple[float, ...]] = []
    begin = time.monotonic()
    print("  ".join(f"{name:>10}" for name in COLUMNS), flush=True)
    while (now := time.monotonic() - begin) < 60 * minutes:
        page.go_on()
        if now >= EVERY_S * len(rows):
            memory, (heap, nodes) = kernel.memory_full_info(), page.weighs()
            rows.append((now / 60, 400 * page.runs, int(lab.data(page.page, "updates")), memory.rss / MB,
                         memory.pss / MB, heap, nodes))  # fmt: skip
            print("  ".join(f"{value:10,.1f}" for value in rows[-1]), flush=True)
        time.sleep(0.25)
    return rows


def verdict(rows: list[tuple[float, ...]], minutes: float) -> bool:
    """Prints what grew; whether all stayed under the bar. Medians of three samples at both ends."""
    after = [row for row in rows if row[0] >= min(5, WARM_UP * minutes)]
    good = True
    for name in ("kernel RSS", "kernel PSS", "page heap"):
        values = [row[COLUMNS.index(name)] for row in after]
        grew = statistics.median(values[-3:]) - statistics.median(values[:3])
        good &= grew < MOST_MB
        span = f"{after[0][0]:.1f} to {after[-1][0]:.1f}"
        print(
            f"{name} grew by {grew:.1f} MB from minute {span}: {'good' if grew < MOST_MB else f'{MOST_MB} MB at most'}"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="colibri-soak-") as folder, sync_playwright() as play:
        server, browser = Server(Path(folder)), play.chromium.launch(executable_path=find_browser(), args=FLAGS)
        try:
            page = Page(browser, server)
            rows = soak(minutes, page, kernel_of(server))
        finally:
            browser.close()
            server.close()
    return 0 if verdict(rows, minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
