"""Each check on machines made of files, and all of them on this one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from colibri_lab import doctor
from colibri_lab.cli import main
from colibri_lab.doctor import BAD, GOOD, NOTE
from colibri_lab.ops import build, gpu


def machine(root: Path, **files: str) -> Path:
    """Files of an invented machine: names with double underscores for slashes."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("chosen", "state"),
    [("always [madvise] never", GOOD), ("[always] madvise never", GOOD), ("always madvise [never]", NOTE), ("", NOTE)],
)
def test_huge_pages(tmp_path: Path, chosen: str, state: str) -> None:
    found = doctor.huge_pages(machine(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=chosen))
    assert found.state == state and ("madvise" in found.do) == ("[never]" in chosen)


@pytest.mark.parametrize(
    ("value", "total", "state", "says"),
    [
        ("60\n", "8000 kB", NOTE, "swappiness 60"),
        ("10\n", "8000 kB", GOOD, "swappiness 10"),
        ("60\n", "0 kB", GOOD, "there is none"),
        ("", "8000 kB", NOTE, "not known here"),
    ],
)
def test_swap(tmp_path: Path, value: str, total: str, state: str, says: str) -> None:
    root = machine(tmp_path, proc__sys__vm__swappiness=value, proc__meminfo=f"MemTotal: 9 kB\nSwapTotal:   {total}\n")
    found = doctor.swappiness(root)
    assert (found.state, found.says) == (state, says)


@pytest.mark.parametrize(
    ("name", "rotational", "state", "kind"),
    [("nvme0n1", "0", GOOD, "NVMe"), ("sda", "0", GOOD, "solid"), ("sda", "1", NOTE, "spinning"),
     ("vda", "1", GOOD, "of a virtual machine")],
)  # fmt: skip
def test_disks(tmp_path: Path, name: str, rotational: str, state: str, kind: str) -> None:
    device = tmp_path.stat().st_dev
    disk = tmp_path / "sys" / "devices" / name
    (disk / "queue").mkdir(parents=True)
    (disk / "p1").mkdir()
    (disk / "queue" / "rotational").write_text(f"{rotational}\n")
    (disk / "queue" / "scheduler").write_text("none [mq-deadline] kyber\n")
    numbers = tmp_path / "sys" / "dev" / "block"
    numbers.mkdir(parents=True)
    (numbers / f"{os.major(device)}:{os.minor(device)}").symlink_to(disk / "p1")  # a partition: its disk has the queue
    found = next(iter(doctor.disk(tmp_path, tmp_path)))
    assert found.state == state and f"{name}, {kind}, scheduler mq-deadline" in found.says
    assert next(iter(doctor.disk(tmp_path, tmp_path / "nowhere"))).state == NOTE


def test_direct_reads_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    found = doctor.direct_reads(tmp_path)
    assert found.state == NOTE and "Invalid argument" in found.says and "page cache" in found.do
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_container_s_limit_is_named(tmp_path: Path) -> None:
    group = {"sys__fs__cgroup__memory.max": str(1 << 30), "sys__fs__cgroup__memory.current": str(1 << 29)}
    root = machine(tmp_path, proc__self__cgroup="0::/\n", **group)
    found = doctor.memory(root)
    assert found.state == NOTE and "0.5 GiB free, 1.0 GiB allowed in this container" in found.says


def test_processor_governor_and_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(
        tmp_path,
        sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave\n",
        proc__cpuinfo="model name\t: A Processor\n",
        proc__driver__nvidia__version="NVRM version: NVIDIA 580\n",
    )
    found = doctor.processor(root)
    assert found.state == NOTE and found.says.startswith("A Processor;") and "performance" in found.do
    lacking = gpu.trouble()
    assert lacking is not None
    says = f"NVRM version: NVIDIA 580; the engine runs on the processor: {lacking.says}"
    assert doctor.gpu(root) == doctor.Finding("GPU", NOTE, says, lacking.do)
    monkeypatch.setattr(gpu, "trouble", lambda: None)
    assert doctor.gpu(root).state == GOOD and "the engine runs on the GPU" in doctor.gpu(root).says
    assert "the engine runs on the processor" in doctor.gpu(tmp_path / "nowhere").says
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor.versions().state == BAD and "missing: numpy" in doctor.versions().says


def test_what_does_not_work_is_bad_and_the_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(os, "access", lambda *_: False)
    build.forget()
    assert main(["doctor"]) == 2
    said = capsys.readouterr().out
    assert "bad   compiler      no C compiler" in said and "bad   cache folder" in said
    assert "note  browser       no Chromium" in said and "-> COLIBRI_CACHE names another folder" in said


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [f["what"] for f in found]
    assert names == [
        "packages", "processor", "compiler", "memory", "huge pages", "swap", "disk", "room", "direct reads",
        "cache folder", "GPU", "browser", "page",
    ]  # fmt: skip
    assert {f["state"] for f in found} <= {GOOD, NOTE} and all(f["says"] for f in found)
    assert not list(tmp_path.iterdir())
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
