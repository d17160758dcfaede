"""JupyterLab on a free loopback port and Debian's chromium in front; a missing browser fails and names its package."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import sync_playwright

TOP = Path(__file__).resolve().parents[2]
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A JupyterLab of its own: own folders for configuration, settings and notebooks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token, self.port = folder, secrets.token_hex(16), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        env = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR"):
            env[name] = str(folder / name.lower())
        env["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
        settings = folder / "jupyterlab_settings_dir"
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        self.write(settings / "@jupyterlab/apputils-extension/notification", quiet)
        self.write(settings / "@jupyterlab/docmanager-extension/plugin", {"autosave": False})
        self.write(settings / "@jupyter-widgets/jupyterlab-manager/plugin", {"saveState": True})
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={self.port}"]
        command += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}", "--allow-root"]
        command += ["--ServerApp.port_retries=0", "--LabApp.expose_app_in_browser=True"]
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(
            command, env=env, cwd=folder, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.wait()

    @staticmethod
    def write(stem: Path, values: dict) -> None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.jupyterlab-settings").write_text(json.dumps(values))

    def wait(self) -> None:
        end = time.monotonic() + 90
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        pytest.fail("JupyterLab did not start:\n" + (self.folder / "server.log").read_text()[-3000:], pytrace=False)

    def notebook(self, name: str, *cells: str) -> str:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, self.notebooks / name)
        return name

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
        self.log.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("jupyter"))
    yield running
    running.close()


@pytest.fixture()
def page(browser, server):
    context = browser.new_context(viewport={"width": 1480, "height": 1500})
    tab = context.new_page()
    tab.hosts = []
    tab.on("request", lambda request: tab.hosts.append(request.url))
    yield tab
    context.close()
