"""`bench batch` and `bench jitter`: what they print, what they leave behind (nothing), and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from colibri_lab.bench import jitter, main
from colibri_lab.bench.jitter import Side
from colibri_lab.bench.neighbour import BLOCK, neighbour
from colibri_lab.bench.result import Result
from colibri_lab.engine.host import Host
from colibri_lab.errors import ConfigError


def form(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_batch_prints_speed_latency_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batches", "4,1,2", "--tokens", "4", "--prompt", "8", "--rounds", "2"]
    assert main(["batch", "--shape", "nano", *small, "--json"]) in (0, 3)
    said = form(capsys)
    rows = {row["what"]: row for row in said["rows"]}
    assert rows["batch 1: speed"]["peer"] is None and rows["batch 4: speed"]["peer"] == "batch 1"
    assert rows["batch 4: speed"]["ratio"] == pytest.approx(
        rows["batch 4: speed"]["value"] / rows["batch 1: speed"]["value"], rel=1e-3
    )
    for size in (1, 2, 4):
        p50, p95, p99 = (rows[f"batch {size}: latency p{share}"]["value"] for share in (50, 95, 99))
        assert 0 < p50 <= p95 <= p99 and rows[f"batch {size}: first token p50"]["value"] > 0
    slots = [rows[f"batch {size}: KV slots"]["value"] for size in (1, 2, 4)]
    assert 0 < slots[0] < slots[1] < slots[2]
    assert rows["batch 1: experts"]["unit"] == "MiB" and rows["batch 4: anonymous memory"]["value"] > 10


def test_batch_on_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "embedded", "--batches", "1,8", "--tokens", "4", "--prompt", "8", "--rounds", "1"]
    assert main(["batch", *small, "--json"]) in (0, 3)
    assert len(form(capsys)["rows"]) == 18


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["batch", "--batches", "1,x"], "--batches '1,x': whole numbers by commas"),
        (["batch", "--batches", "0"], "--batches 0: numbers from 1 to 256"),
        (["batch", "--shape", "nano", "--prompt", "2000"], "shape nano has 1024"),
        (["batch", "--shape", "nano", "--engine-mode", "turbo"], "engine_mode"),
        (["batch", "--shape", "embedded", "--text", "/nowhere"], "/nowhere has not 1024 tokens of .txt files"),
        (["jitter", "--shape", "embedded", "--text", "/nowhere"], "/nowhere holds no .txt files"),
        (["jitter", "--priority", "highest"], "io_priority"),
        (["jitter", "--mask", "3"], "cpu_affinity_mask: a mask of cores"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("colibri-lab: error: ") and says in error and error.count("\n") == 1


def test_jitter_compares_settings_alone_and_beside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jitter.ours, "folder", lambda: tmp_path)
    standing = psutil.Process().ionice(), psutil.Process().cpu_affinity()
    assert main(["jitter", "--shape", "embedded", "--tokens", "8", "--rounds", "1", "--priority", "low", "--json"]) in (
        0,
        3,
    )
    said = form(capsys)
    rows = {row["what"]: row for row in said["rows"]}
    core = max(os.sched_getaffinity(0))
    names = ("none", "io_priority low", f"cores {core}", "both")
    for where in ("alone", "neighbour"):
        for name in names:
            p50, p95, p99 = (rows[f"{where}, {name}: p{share}"]["value"] for share in (50, 95, 99))
            assert 0 < p50 <= p95 <= p99
    assert rows["neighbour, both: p99"]["peer"] == "neighbour, none" and rows["alone, none: p99"]["peer"] is None
    assert rows["neighbour, none: p50"]["peer"] == "alone, none"
    assert sum("beside the neighbour: " in note for note in said["notes"]) == 3
    assert any("the neighbour moved" in note for note in said["notes"])
    assert any(note.startswith("I/O scheduler ") for note in said["notes"])
    assert not list(tmp_path.iterdir()), "nothing is left"
    assert (psutil.Process().ionice(), psutil.Process().cpu_affinity()) == standing


def test_what_the_system_refuses_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poor(Host):
        def __init__(self, io_priority: str = "none", mask: int | None = None) -> None:
            if io_priority == "high":
                raise ConfigError("settings: io_priority: the system refuses it")
            super().__init__(io_priority, mask)

    monkeypatch.setattr(jitter, "Host", Poor)
    result, core = Result("jitter"), max(os.sched_getaffinity(0))
    assert list(jitter._settings(jitter.Plan(), result)) == ["none", f"cores {core}"]
    assert [note.split(":")[0] for note in result.notes] == ["io_priority high", "both"]


def test_the_verdict_needs_every_round() -> None:
    def side(*tails: float) -> Side:
        return Side([[tail] * 5 for tail in tails])

    sides = {("neighbour", "none"): side(10, 10), ("neighbour", "a"): side(5, 8), ("neighbour", "b"): side(5, 10),
             ("neighbour", "c"): side(20, 12)}  # fmt: skip
    result = Result("jitter")
    jitter._verdict(result, sides, ("none", "a", "b", "c"))
    assert [note.split(": ")[1].split(" ")[0] for note in result.notes] == ["helps", "no", "harms"]
    assert "(none over it 1.25 to 2.00)" in result.notes[0]


def test_the_neighbour_works_and_leaves_nothing(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with neighbour(tmp_path) as hungry:
        assert not list(tmp_path.iterdir()), "its file has no name"
        time.sleep(0.3)
    assert hungry.rate > BLOCK
    with pytest.raises(KeyboardInterrupt), neighbour(tmp_path):
        raise KeyboardInterrupt
    assert psutil.Process().children() == before and not list(tmp_path.iterdir())
    with (
        pytest.raises(ValueError, match=r"the disk-hungry neighbour cannot work in .*: No such file"),
        neighbour(tmp_path / "x"),
    ):
        raise AssertionError("it cannot begin")


def test_the_neighbour_ends_with_whoever_started_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from colibri_lab.bench.neighbour import neighbour\n"
        "with neighbour(Path(sys.argv[1])): print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "there\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone
