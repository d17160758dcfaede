"""Kernel texts and launches: what is bundled, listed and refused before a device sees it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops import launch
from colibri_lab.ops.launch import KERNELS, Kernels, LaunchError, bundle, signatures
from colibri_lab.ops.simulator import SimDevice, SimulatedFault, fenced


def array(values: Any, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    host = np.asarray(values, dtype)
    made = fenced(host.shape, dtype)
    made[...] = host
    return made


def test_every_file_is_listed(top: Path) -> None:
    assert {path.stem for path in (top / "kernels/cuda").glob("*.cu")} == set(KERNELS)
    for file in KERNELS:
        assert set(signatures(file)) == set(KERNELS[file])


@pytest.mark.parametrize("side", ["device", "hostsim"])
@pytest.mark.parametrize("file", KERNELS)
def test_a_bundle_is_one_text(file: str, side: str) -> None:
    """Each include once and in place, no quoted include left, lines numbered as in their files."""
    text = bundle(file, side)
    assert '#include "' not in text and text.count('#line 1 "common.cuh"') == 1
    assert ("asm(" in text) == (side == "device" or "sim_switch" in text)
    source = (launch.kernels_dir() / "cuda" / f"{file}.cu").read_text().splitlines()
    lines, number, name = text.splitlines(), 0, ""
    seen = 0
    for line in lines:
        if line.startswith("#line"):
            _, at, name = line.split(" ")
            number = int(at)
            continue
        if name == f'"{file}.cu"':
            assert line == source[number - 1]
            seen += 1
        number += 1
    assert seen == sum(not line.startswith('#include "') for line in source)


def test_an_edit_of_a_header_changes_the_text(top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler's cache is keyed by holds everything: no header is reached by a search path."""
    shutil.copytree(top / "kernels/cuda", tmp_path / "cuda")
    monkeypatch.setattr(launch, "kernels_dir", lambda: tmp_path)
    before = bundle("rms_norm")
    header = tmp_path / "cuda/common.cuh"
    header.write_text(header.read_text() + "// edited\n")
    assert bundle("rms_norm") != before
    (tmp_path / "cuda/device/clb.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no clb\.cuh"):
        bundle("rms_norm")


def test_types_of_template_instances() -> None:
    half, single = (signatures("embed")[f"embed<{t}>"] for t in ("half_t", "float"))
    assert half.parameters[0] == ("table", np.dtype(np.float16), True)
    assert single.parameters[0] == ("table", np.dtype(np.float32), True)
    assert half.parameters[3] == ("cols", np.dtype(np.int32), False) and half.threads == 256


X, ROWS, WEIGHT, OUT = (lambda: array(np.ones((2, 40))), lambda: array([1, 0], np.int32), lambda: array(np.ones(40)),
                        lambda: fenced((2, 40), np.float32))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: np.float64}, "rms_norm: x is an array of float32, not of float64"),
        ({0: 3}, "rms_norm: x is an array"),
        ({4: None}, "rms_norm: cols is a number"),
        ({"drop": 1}, "rms_norm: 5 arguments, the kernel has 6"),
        ({"threads": 300}, "300 threads, a block has whole warps and at most 256"),
        ({"threads": 40}, "40 threads"),
        ({"grid": (1, 70000, 1)}, "more than a device takes"),
        ({"strided": 0}, "rms_norm: x is not contiguous"),
    ],
)
def test_wrong_launches_are_refused(change: dict[Any, Any], says: str) -> None:
    arguments: list[Any] = [X(), ROWS(), WEIGHT(), OUT(), 40, 1e-5]
    for place, value in change.items():
        if isinstance(place, int):
            arguments[place] = arguments[place].astype(value) if isinstance(value, type) else value
    if "strided" in change:
        arguments[0] = array(np.ones((2, 80)))[:, ::2]
    if "drop" in change:
        arguments.pop()
    with pytest.raises(LaunchError, match=says):
        Kernels(SimDevice())("rms_norm", change.get("grid", (2, 1, 1)), change.get("threads", 256), *arguments,
                             shared=32)  # fmt: skip


def test_an_empty_grid_launches_nothing() -> None:
    kernels, out = Kernels(SimDevice()), OUT()
    kernels("rms_norm", (0, 1, 1), 256, X(), ROWS(), WEIGHT(), out, 40, 1e-5, shared=32)
    assert not kernels.launches and np.isnan(out).all()
    kernels("rms_norm", (2, 1, 1), 256, X(), ROWS(), WEIGHT(), out, 40, 1e-5, shared=32)
    assert kernels.launches == {"rms_norm": 1} and np.allclose(out, 1)


def test_a_read_past_the_end_is_caught() -> None:
    short = array(np.ones((2, 40)))[:, :39].reshape(-1)[:78]
    with pytest.raises(SimulatedFault, match=r"rms_norm: block \(\d,0,0\) thread .*: invalid memory access"):
        Kernels(SimDevice())("rms_norm", (2, 1, 1), 256, array(short), ROWS(), WEIGHT(), OUT(), 40, 1e-5, shared=32)
