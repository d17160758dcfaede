"""Every kernel and template instance compiles for each GPU architecture, within its budgets: no GPU is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.ops.launch import KERNELS

from . import nvrtc


@pytest.fixture(scope="module")
def budgets(top: Path) -> dict[str, Any]:
    return json.loads((top / "kernels/budgets.json").read_text())


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("file", KERNELS)
def test_budgets(file: str, architecture: str, budgets: dict[str, Any]) -> None:
    """Registers; nothing spilled, no stack, no static shared memory (its size comes with a launch)."""
    cubin, _, lowered = nvrtc.compiled(file, architecture)
    assert cubin[:4] == b"\x7fELF" and set(lowered) == set(KERNELS[file])
    allowed = budgets["registers"]
    for name, used in nvrtc.used(file, architecture).items():
        assert 0 < used.registers <= allowed.get(name, allowed["default"]), f"{name}: {used}"
        assert (used.spilled, used.stack, used.shared) == (0, 0, budgets["static_shared"]), f"{name}: {used}"


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_instructions_per_weight(architecture: str, budgets: dict[str, Any]) -> None:
    """Of the expert products: in the loop over the inputs of a group, and with all around it for groups of 32."""
    for name, allowed in budgets["instructions_per_weight"].items():
        inner, *_, outer = nvrtc.loops("matmul", name, architecture)
        assert outer.begin < inner.begin < inner.end < outer.end
        loops = (("inner", inner), ("group 32", outer))
        measured = {what: loop.instructions / loop.products for what, loop in loops}
        for what, most in allowed.items():
            assert 0.1 < measured[what] <= most, f"{name} on {architecture}: {measured}"


def test_budgets_name_what_exists(budgets: dict[str, Any]) -> None:
    names = {name for listed in KERNELS.values() for name in listed} | {"default"}
    assert set(budgets["registers"]) | set(budgets["instructions_per_weight"]) <= names


def test_an_error_names_the_kernels_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "head", ("finish_logits", "nowhere"))
    with pytest.raises(AssertionError, match="nowhere"):
        nvrtc.compiled("head", "sm_90")
    right = nvrtc.bundle("head")
    monkeypatch.setitem(KERNELS, "head", ("finish_logits",))
    monkeypatch.setattr(nvrtc, "bundle", lambda file: right.replace("block_max(top, room)", "block_most(top)"))
    with pytest.raises(AssertionError, match=r"head\.cu\(11\): error.*block_most"):
        nvrtc.compiled("head", "sm_90")
