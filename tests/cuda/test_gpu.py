"""What is said where a GPU cannot be used: one sentence that names what is missing and how to get it (H1, H2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colibri_lab import doctor
from colibri_lab.cli import main
from colibri_lab.ops import gpu
from colibri_lab.ops.select import NoGpu, choose_backend

from .card import Card, CUDARuntimeError, plug_in

NO_DEVICE = CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
NOT_FOUND = RuntimeError("CUDA driver error: libnvrtc.so.13: cannot open shared object file")
HEADER = RuntimeError('catastrophic error: cannot open source file "vector_types.h"')
ARCH = RuntimeError("nvrtc: error: invalid value for --gpu-architecture (-arch)")
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no driver": ({"driver": 0}, "there is no NVIDIA driver here; install the driver of the card"),
    "old driver": (
        {"driver": 12040},
        "the NVIDIA driver is for CUDA 12.4, CuPy for 13.2; install a newer driver, or pip install cupy-cuda12x",
    ),
    "no card": ({"count_error": NO_DEVICE}, "the driver finds no card (CUDARuntimeError: cudaErrorNoDevice"),
    "none visible": ({"count": 0}, "the driver finds no card; nvidia-smi -L lists"),
    "no NVRTC": ({"nvrtc_error": NOT_FOUND}, "cannot be loaded (RuntimeError: CUDA driver error: libnvrtc.so.13"),
    "other NVRTC": (
        {"nvrtc": (12, 9)},
        "NVRTC 12.9 does not match CuPy's CUDA 13.2; pip install 'nvidia-cuda-nvrtc==13.*'",
    ),
    "no memory": ({"memory": 0}, "the card has no memory left; see with nvidia-smi who uses it"),
    "broken": ({"error_at": 1}, "the card does not work (CUDARuntimeError: cudaErrorIllegalAddress"),
    "old card": ({"capability": (6, 1)}, "compute capability 6.1 is older than 7.5; backend: cpu runs everywhere"),
    "no headers": ({"compile_error": HEADER}, "finds no headers of the toolkit for sm_90"),
    "unknown architecture": ({"compile_error": ARCH, "capability": (13, 0)}, "refuses the kernels for sm_130 (Runtime"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By name it is an error, `auto` runs on the processor and says why; nothing is held."""
    about, says = CASES[name]
    card = plug_in(monkeypatch, Card(**about))
    with pytest.raises(NoGpu) as refused:
        choose_backend("cuda")
    said = str(refused.value)
    assert said.startswith("backend: cuda: ") and says in said and "\n" not in said
    if "error_at" in about:
        card.error_at = card.calls + 1
    backend, why = choose_backend("auto", "fast", 2)
    assert backend.name == "cpu" and said.split("; ")[0].removeprefix("backend: cuda: ") in why
    assert "kernels for" in why and card.clean


def test_hidden_cards_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, Card(count_error=NO_DEVICE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(NoGpu, match="CUDA_VISIBLE_DEVICES is '-1': unset it"):
        choose_backend("cuda")


def test_auto_takes_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, Card())
    backend, why = choose_backend("auto")
    assert backend.name == "cuda" and why == "there is a GPU; Fake H0, 2.0 GiB, 2.0 free, compute capability 9.0"
    backend.close()


def test_a_failure_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine of a process does not compile in vain again."""
    card = plug_in(monkeypatch, Card(compile_error=HEADER))
    for _ in range(3):
        assert choose_backend("auto", "fast", 1)[0].name == "cpu"
    assert [e[0] for e in card.log].count("compile") == 1


def test_what_was_missing_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that was full a moment ago is taken by the next engine."""
    card = plug_in(monkeypatch, Card(memory=0))
    assert choose_backend("auto", "fast", 1)[0].name == "cpu"
    card.memory = 1 << 30
    backend = choose_backend("auto")[0]
    assert backend.name == "cuda"
    backend.close()


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        (
            "ImportError('libcublas.so.13: cannot open shared object file')",
            "CuPy cannot be used (ImportError: libcublas",
        ),
        ("OSError('bad ELF')", "CuPy cannot be used (OSError: bad ELF)"),
    ],
)
def test_a_cupy_that_cannot_be_imported(tmp_path: Path, top: Path, raises: str, says: str) -> None:
    (tmp_path / "cupy.py").write_text(f"raise {raises}\n")
    program = (
        "from colibri_lab.ops import gpu, select\n"
        "import sys, colibri_lab\n"
        "assert 'cupy' not in sys.modules\n"
        "backend, why = select.choose_backend('auto', 'fast', 1)\n"
        "print(backend.name)\n"
        "print([c.says for c in gpu.checks() if not c.fine], why)\n"
    )
    paths = f"{top}{os.pathsep}{tmp_path}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONPATH": paths})  # fmt: skip
    lines = ran.stdout.splitlines()
    assert lines[0] == "cpu" and not ran.stderr
    assert "there is no NVIDIA driver here" in lines[1] or says in lines[1]
    program = "from colibri_lab.ops import gpu\nprint(*[c.says for c in gpu._needed(gpu.Path('/'))], sep='\\n')\n"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONPATH": paths})  # fmt: skip
    assert says in ran.stdout


def test_cupy_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA 580.1\nGCC\n")
    driver, cupy = gpu.checks(tmp_path)
    assert (driver.fine, driver.says, cupy.fine) == (True, "NVRM version: NVIDIA 580.1", False)
    assert cupy.says == "CuPy is not installed" and cupy.do == "pip install 'colibri-lab[cuda]'"


def test_doctor_says_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plug_in(monkeypatch, Card())
    assert main(["doctor", "--gpu", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert list(found) == ["driver", "CuPy", "cards", "NVRTC", "card", "kernels", "locked memory"]
    assert found["CuPy"]["says"] == "CuPy 14.0.0, made for CUDA 13.2"
    assert "2.0 GiB" in found["card"]["says"] and "without any header" in found["kernels"]["says"]
    plug_in(monkeypatch, Card(nvrtc=(12, 9)))
    assert main(["doctor", "--gpu"]) == 2
    said = capsys.readouterr().out
    assert "bad   NVRTC" in said and "-> pip install 'nvidia-cuda-nvrtc==13.*'" in said and "locked memory" in said


@pytest.mark.parametrize("limit", [None, 8 << 20])
def test_locked_memory_is_named(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    import resource

    soft = resource.RLIM_INFINITY if limit is None else limit
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    last = doctor.gpus()[-1]
    assert last.what == "locked memory" and last.says == ("no limit" if limit is None else "8 MiB (ulimit -l)")
    assert bool(last.do) == (limit is not None)
