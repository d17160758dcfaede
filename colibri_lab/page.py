"""The board as a page of its own: Voila over a notebook of one cell, for people who want no cells."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .errors import ConfigError

# the page talks to nobody but this machine, whatever a template links to
ONLY_HERE = "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:; "
ONLY_HERE += "style-src 'self' 'unsafe-inline'; frame-ancestors 'self'"


def notebook(source: Path, settings: Mapping[str, Any], recorded: bool = False) -> dict[str, Any]:
    """One cell that shows the lab of what Engine.load takes, or a recorded run; every page that opens runs it anew.

    Paths in settings are meant from here.
    """
    made = f"replay({str(source.resolve())!r})" if recorded else f"Lab({str(source.resolve())!r}, **{dict(settings)!r})"
    cell = f"import os, colibri_lab\nos.chdir({str(Path.cwd())!r})\nlab = colibri_lab.{made}\nlab"
    code: dict[str, Any] = {
        "cell_type": "code",
        "id": "board",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": cell,
    }
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    about = {"kernelspec": kernel, "title": "Colibri Lab"}
    return {"cells": [code], "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def serve(book: Mapping[str, Any], port: int, browser: bool, dark: bool) -> int:
    """Runs Voila on the notebook, on loopback and with a token, until it is interrupted; returns its exit code.

    ConfigError where Voila is not installed.
    """
    if importlib.util.find_spec("voila") is None:
        raise ConfigError("board: Voila is not installed; pip install 'colibri-lab[voila]'")
    with TemporaryDirectory(prefix="colibri-board-") as folder:
        (Path(folder) / "board.ipynb").write_text(json.dumps(book))
        # a page that is left says so by a request for which Voila sets no cookie; no other site has the login's
        settings = {"headers": {"Content-Security-Policy": ONLY_HERE}, "disable_check_xsrf": True}
        server = {"ip": "127.0.0.1", "port": port, "auto_token": True, "open_browser": browser}
        shown = {"show_tracebacks": True, "theme": "dark" if dark else "light"}
        config = {"Voila": server | {"tornado_settings": settings}, "VoilaConfiguration": shown}
        config["MappingKernelManager"] = {"cull_idle_timeout": 60, "cull_interval": 20}  # of pages that vanished
        (Path(folder) / "voila.json").write_text(json.dumps(config))
        return subprocess.call([sys.executable, "-m", "voila", "board.ipynb"], cwd=folder)
