"""Servers under the browser tests: JupyterLab, and pages of their own; each in folders of its own, on loopback."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

TOP = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """Below the ports that the system gives to whoever asks for any, as kernels do, and none of another worker's: so
    nobody takes it before the server does."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = 20_000 + 8 * secrets.randbelow(1_500) + worker % 8
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody has it
                continue
            return port


class Running:
    """A server process in folders of its own for configuration, settings and notebooks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.env = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1"}
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR"):
            self.env[name] = str(folder / name.lower())
        self.log = (folder / "server.log").open("w")

    def start(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], env=self.env, cwd=self.folder, stdout=self.log, stderr=self.log,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, answers, name: str) -> None:
        end = time.monotonic() + 180
        while time.monotonic() < end and self.process.poll() is None:
            if answers():
                return
            time.sleep(0.2)
        pytest.fail(f"{name} did not start:\n{self.said()[-3000:]}", pytrace=False)

    def said(self) -> str:
        return (self.folder / "server.log").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
        self.log.close()


class Server(Running):
    """A JupyterLab."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.token, self.url = secrets.token_hex(16), f"http://127.0.0.1:{self.port}"
        self.env["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
        settings = folder / "jupyterlab_settings_dir"
        quiet = {"fetchNews": "false", "checkForUpdates": False}
        self.write(settings / "@jupyterlab/apputils-extension/notification", quiet)
        self.write(settings / "@jupyterlab/docmanager-extension/plugin", {"autosave": False})
        self.write(settings / "@jupyter-widgets/jupyterlab-manager/plugin", {"saveState": True})
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        command = ["jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={self.port}", "--allow-root"]
        command += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}"]
        command += ["--ServerApp.port_retries=0", "--LabApp.expose_app_in_browser=True"]
        self.start(*command)
        self.wait(self.answers, "JupyterLab")

    @staticmethod
    def write(stem: Path, values: dict) -> None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.jupyterlab-settings").write_text(json.dumps(values))

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=2):
                return True
        except OSError:
            return False

    def notebook(self, name: str, *cells: str) -> str:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(book, self.notebooks / name)
        return name


class Page(Running):
    """A page of its own, served by Voila: `colibri-lab board` with options, or any notebook; `url` has its token."""

    def __init__(self, folder: Path, *options: str, notebook: Path | None = None) -> None:
        super().__init__(folder)
        if notebook is None:
            self.start("colibri_lab", "board", "--no-browser", "--port", str(self.port), *options)
        else:
            self.start("voila", str(notebook), "--no-browser", "--Voila.ip=127.0.0.1", f"--port={self.port}", *options)
        self.wait(lambda: self.address() is not None, "Voila")
        self.url = self.address()

    def address(self) -> str | None:
        found = re.search(r"http://127\.0\.0\.1:\d+/\S*", self.said())
        return found and found.group()
