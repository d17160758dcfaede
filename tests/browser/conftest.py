"""JupyterLab on a free loopback port and Debian's chromium in front; a missing browser fails and names its package."""

from __future__ import annotations

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import PATIENCE_S
from tests.browser.servers import Server

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run", "--force-color-profile=srgb"]


def find_browser() -> str:
    named = os.environ.get("COLIBRI_BROWSER")
    for name in [named] if named else ["chromium", "chromium-browser", "google-chrome", "chrome"]:
        if found := shutil.which(name):
            return found
    pytest.fail(
        "no Chromium found: install the Debian package `chromium` (apt-get install chromium), "
        "or name a browser with COLIBRI_BROWSER",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def browser():
    path = find_browser()
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("jupyter"))
    yield running
    running.close()


@pytest.fixture()
def page(browser, server):
    context = browser.new_context(viewport={"width": 1480, "height": 1500})
    context.set_default_timeout(1000 * PATIENCE_S)
    tab = context.new_page()
    tab.hosts = []
    tab.on("request", lambda request: tab.hosts.append(request.url))
    tab.on("requestfailed", lambda request: tab.hosts.remove(request.url) if request.failure == "csp" else None)
    yield tab
    context.close()
