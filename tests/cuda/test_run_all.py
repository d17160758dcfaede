"""tests/gpu without a GPU: its sections at tiny sizes on the simulator, and its runner with sections that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.ops import gpu
from colibri_lab.ops.driver_cupy import CupyDriver
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.simulator import SimDriver
from tests.cuda.card import Card, plug_in
from tests.gpu import proof, rows, run_all
from tests.gpu.machine import CardClock, Launch, Machine, Tape, WallClock, simulated
from tests.gpu.rows import Row, Rows
from tests.gpu.sanitized import run as run_sanitized
from tests.gpu.shapes import LARGE, QWEN3, TINY, fitting, quick
from tests.makers import make


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    at = tmp_path_factory.mktemp("gpu")
    model = convert(make("mixtral", 12).save(at / "hf"), at / "model", quantize="int4")
    return simulated(TINY, model, {})


@pytest.fixture(scope="module")
def folder(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ceilings, which other sections measure against."""
    at = tmp_path_factory.mktemp("out")
    assert run_all.run("ceilings", machine, at)
    machine.ceilings.update(run_all.ceilings(at))
    return at


def found(folder: Path, section: str) -> dict[str, Row]:
    return {row.what: row for row in rows.read(folder, section)}


def test_ceilings(machine: Machine, folder: Path) -> None:
    said = found(folder, "ceilings")
    assert list(said) == ["device copy", "host link, 64 KiB", "host link, 128 KiB", "host link, one expert"]
    assert said["host link, one expert"].least == 0.85 and said["host link, one expert"].share
    assert all(row.value > 0 and row.unit == "GB/s" for row in said.values())
    assert machine.ceilings["device copy"] == said["device copy"].value


@pytest.mark.parametrize("section", [s for s in run_all.SECTIONS if s not in ("ceilings", "environment", "sanitizer")])
def test_a_section_ends_well(machine: Machine, folder: Path, section: str) -> None:
    assert run_all.run(section, machine, folder), found(folder, section)["failed"].value
    said = found(folder, section)
    assert said and "failed" not in said
    if section == "speed":
        assert "layer: matmul_fast<Int4, 1>, rate" in said and said["layer: route_softmax"].most == 5.0
        assert said["layer: expert products at batch 1, rate"].least == 0.7
        assert all(row.share is not None for what, row in said.items() if what.endswith(", rate"))
    if section == "decode":
        assert said["layer: launched again, the same logits"].value and said["layer: each layer, launch by launch"].most
        assert said["stack: launched again, the same logits"].value
    if section == "attention":
        assert list(said) == ["attention over 300 tokens", "attention over 300 tokens, rate"]
    if section == "engine":
        assert said["tokens equal to the CPU's"].value is True
    if section == "kernels":
        assert said["sampled tokens of 70"].value == "24 of 24 surely the sampler's, 0 wrong"
    if section == "half":
        assert said["layer, all: experts_faults"].value == 0 < said["layer, half: experts_faults"].value
        assert said["layer: the same logits"].value and said["stack: the same logits"].value
    if section == "paging":
        assert said["pager: faults"].value > 0


@pytest.mark.parametrize("section", ["ceilings", "kernels", "engine", "attention", "decode", "half", "paging"])
def test_a_section_through_the_driver_of_a_card(machine: Machine, folder: Path, tmp_path: Path, section: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The same through CuPy's calls, on a card that does its work as late as it may; all is given back."""
    card = plug_in(monkeypatch, Card())
    there = replace(machine, driver=CupyDriver, backend="cuda", compile=CupyDriver.compile)
    assert run_all.run(section, there, tmp_path), found(tmp_path, section)["failed"].value
    assert card.clean and any(what[0] == "launch" for what in card.log) == (section != "ceilings")


def test_environment_and_sanitizer_say_what_is_not_here(machine: Machine, tmp_path: Path) -> None:
    for section in ("environment", "sanitizer"):
        assert run_all.run(section, machine, tmp_path)
    assert found(tmp_path, "environment")["card"].value == "simulator"
    if not any(Path("/usr/local").glob("cuda*/bin")):
        assert "is not here" in str(found(tmp_path, "sanitizer")["compute-sanitizer"].value)
    assert run_sanitized(machine) == 16


def test_the_large_sizes_run_every_kernel_and_fit() -> None:
    """All formats; 128 experts of 48 layers where there is room, fewer layers where there is less."""
    assert {shape.dtype for shape in LARGE.shapes.values()} == {"fp32", "fp16", "int8", "int4"}
    assert fitting(QWEN3, 64 << 30).layers == 48 and fitting(QWEN3, 1 << 30).layers == 3
    assert fitting(QWEN3, 0).layers == 1
    weights, pages = quick(TINY.stack)
    assert len(pages.frames) == 12 * weights.expert[2].pages and pages.frames.shape[1] == PAGE
    assert (pages.frames.reshape(12, -1) == pages.frames[: weights.expert[2].pages].reshape(-1)).all()


def test_a_tape_keeps_what_the_host_wrote() -> None:
    """A buffer that is filled again between two launches is kept as it was at each; a result is not copied."""
    tape = Tape(SimDriver())
    stream, (x, out) = tape.stream(), (tape.empty((4,), np.float32) for _ in range(2))
    tape.keeps = True
    for value in (1.0, 2.0):
        tape.write(x, np.full(4, value, np.float32), stream)
        tape.part = f"part {value:g}"
        tape.launch("expert_ffn", "add_sum", (1, 1, 1), 32, [out, x, np.int32(4)], 0, stream)
    tape.keeps = False
    tape.write(x, np.zeros(4, np.float32), stream)
    first, second = tape.launches
    assert first.named()["sum"].tolist() == [1] * 4 and second.named()["sum"].tolist() == [2] * 4
    assert first.named()["x"] is out and (first.part, second.part) == ("part 1", "part 2")
    out[:] = 0
    WallClock().launches(tape, tape.launches, 1)
    assert out.tolist() == [6] * 4  # once to warm up, once to be timed
    tape.forget()
    assert not tape.launches


class Cupy:
    """Streams and events in the order of their calls; launches land in the same list."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.cuda = self
        self.memcpyDeviceToDevice, self.runtime = 3, self

    def Event(self) -> Any:
        cupy = self

        class Event:
            def record(self, stream: Any) -> None:
                cupy.said.append("record")

            def synchronize(self) -> None:
                cupy.said.append("wait")

        return Event()

    def get_elapsed_time(self, begin: Any, end: Any) -> float:
        return 6.0

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.said.append(f"copy {size} {kind}")


class Stream:
    ptr = 0

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def __enter__(self) -> None:
        self.said.append("enter")

    def __exit__(self, *_: object) -> None:
        self.said.append("leave")

    def begin_capture(self) -> None:
        self.said.append("capture")

    def end_capture(self) -> Any:
        self.said.append("end")
        return self

    def launch(self, stream: Any) -> None:
        self.said.append("graph")


def test_a_cards_clock_times_one_graph() -> None:
    """Launches go once before the capture (they compile), then into it, and the graph alone is timed."""
    cupy = Cupy()

    class Driver:
        def stream(self) -> Any:
            return Stream(cupy.said)

        def synchronise(self, stream: Any) -> None:
            cupy.said.append("synchronise")

        def launch(self, file: str, name: str, *_: Any) -> None:
            cupy.said.append(name)

    clock = CardClock(cupy)
    one = Launch("", "expert_ffn", "clear", (1, 1, 1), 32, [], 0)
    assert clock.launches(Driver(), [one], 3) == pytest.approx(2e-3)
    assert cupy.said == ["clear", "synchronise", "enter", "capture", "clear", "end", "leave", "graph", "record",
                         "graph", "graph", "graph", "record", "wait"]  # fmt: skip
    array = np.zeros(8, np.uint8)
    clock.copy(Driver(), array, array, Stream(cupy.said))
    assert cupy.said[-1] == "copy 8 3"


def test_bars_and_lines() -> None:
    assert Row("a", 80.0, "us", most=75.0).line() == "a: 80 us, at most 75: MISSED"
    assert Row("b", 3000.0, "GB/s", share=0.75, least=0.7).met is True
    assert "75.0 % of the ceiling, at least 0.7: met" in Row("b", 3000.0, "GB/s", share=0.75, least=0.7).line()
    assert Row("c", "words").met is None and Row("d", "words", most=1.0).met is False


CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from tests.gpu.rows import Rows
folder, name = Path(sys.argv[2]), sys.argv[4]
put = Rows(folder, name)
put("began", True)
if name == "compile": raise SystemExit(1)
if name == "ceilings": os.kill(os.getpid(), 9)
if name == "kernels":
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    put("started", started.pid)
    time.sleep(60)
put("ended", 1.5, "ms", most=2.0)
"""


def alive(number: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sections_that_fail_die_or_hang_leave_what_they_had(tmp_path: Path, top: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(top))
    monkeypatch.setitem(run_all.SECTIONS, "kernels", (proof.kernels, 3.0))
    names = ("environment", "compile", "ceilings", "kernels", "engine")
    assert not run_all.run_all(tmp_path, names, (sys.executable, str(child)), 60)
    told = json.loads((tmp_path / "results.json").read_text())
    ended = {one["section"]: one["ended"] for one in told["sections"]}
    assert ended["environment"] == ended["engine"] == "done" and ended["kernels"] == "stopped after 3 s"
    assert ended["compile"].startswith("failed (exit code 1") and ended["ceilings"].startswith("failed (exit code -9")
    assert all(one["rows"][0]["what"] == "began" for one in told["sections"])
    assert told["sections"][0]["rows"][1]["met"] is True
    assert not alive(told["sections"][3]["rows"][1]["value"]), "what a section has started ends with it"
    summary = (tmp_path / "summary.md").read_text()
    assert "## kernels: stopped after 3 s\n\n- began: True\n" in summary and "ended: 1.5 ms, at most 2: met" in summary
    assert not list(tmp_path.glob("*.new"))
    assert run_all.run_all(tmp_path, ("engine",), (sys.executable, str(child)), 60)
    assert not run_all.run_all(tmp_path, ("engine",), (sys.executable, str(child)), 1)
    assert "not begun: the time was up" in (tmp_path / "summary.md").read_text()


def test_a_section_that_raises_says_why(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(m: Machine, put: Rows) -> None:
        put("first", 1)
        raise ValueError("the second\nline")

    monkeypatch.setitem(run_all.SECTIONS, "engine", (broken, 1.0))
    assert not run_all.run("engine", machine, tmp_path)
    assert [(row.what, row.value) for row in rows.read(tmp_path, "engine")] == [
        ("first", 1),
        ("failed", "ValueError: the second"),
    ]


def test_without_a_gpu_it_says_so_and_ends(tmp_path: Path, top: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(top), "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "tests.gpu.run_all", "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout == "" and not (tmp_path / "out").exists()
    assert ran.stderr.startswith("no GPU to use here: ") and len(ran.stderr.splitlines()) == 1


def test_unknown_sections_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(gpu, "trouble", lambda: None)
    with pytest.raises(SystemExit) as error:
        run_all.main(["--out", str(tmp_path), "kernel"])
    assert error.value.code == 2 and "there is no section 'kernel'" in capsys.readouterr().err
