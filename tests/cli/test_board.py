"""`colibri-lab board`: what it hands to Voila, and what it refuses before there is a page."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from colibri_lab import page
from colibri_lab.cli import main
from colibri_lab.paths import embedded_model


@pytest.fixture()
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The notebook's cell and Voila's configuration, in place of a server."""
    seen: list[dict] = []

    def call(command: list[str], cwd: str) -> int:
        cell = json.loads((Path(cwd) / "board.ipynb").read_text())["cells"][0]["source"]
        seen.append({"cell": cell, "command": command[1:], **json.loads((Path(cwd) / "voila.json").read_text())})
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return seen


def test_the_model_and_settings_reach_the_cell(served: list[dict], tmp_path: Path) -> None:
    arguments = ["--set", "expert_cache_bytes=4MiB", "--set", "pace=40", "--port", "9000", "--no-browser", "--dark"]
    assert main(["board", *arguments]) == 0
    (told,) = served
    assert f"Lab({str(embedded_model())!r}, **{{'expert_cache_bytes': '4MiB', 'pace': 40}})" in told["cell"]
    assert f"os.chdir({os.getcwd()!r})" in told["cell"], "paths in settings are meant from here"
    assert told["Voila"] | {"tornado_settings": None} == {
        "ip": "127.0.0.1", "port": 9000, "auto_token": True, "open_browser": False, "tornado_settings": None,
    }  # fmt: skip
    assert told["VoilaConfiguration"]["theme"] == "dark"
    config = tmp_path / "mine.yaml"
    config.write_text(f"model_path: {embedded_model()}\nthreads: 1\n")
    assert main(["board", "--config", str(config), "--set", "pace=9"]) == 0
    assert f"Lab({str(config)!r}, **{{'pace': 9}})" in served[1]["cell"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "pase=4"], "pase"),
        (["--set", "pace"], "must be key=value"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--replay", "x", "--model", "y"], "--replay: a recorded run has no model"),
        (["--port", "0"], "port"),
    ],
)
def test_wrong_input_is_said_before_there_is_a_page(
    served: list[dict], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error and not served


def test_without_voila_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[dict]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None if name == "voila" else find(name))
    assert main(["board"]) == 2
    assert "Voila is not installed; pip install 'colibri-lab[voila]'" in capsys.readouterr().err
    assert not served
