"""Kernels that a reader changes: what is right passes in all orders, what is wrong is found and said where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.ops.build import KernelError
from colibri_lab.ops.examples import EXAMPLES, Example, norm
from colibri_lab.ops.trial import ORDERS, changed, check, source

RACE = ("rms_norm", "room[warp] = v;\n  __syncthreads();", "room[warp] = v;")


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_there_is_right(name: str) -> None:
    verdict = check(EXAMPLES[name]())
    assert verdict.right and str(verdict).endswith(f"right in {len(ORDERS)} orders of threads")


def test_a_race_is_found() -> None:
    verdict = check(norm(), changed(*RACE))
    assert not verdict.right
    said = str(verdict)
    assert "forward: out[0, 0] is nan, -1.19705 is right (138 of 200 differ)" in said
    assert "random 1: out" in said and "thread 0 writes shared[0], thread 32 reads it" in said


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "says"),
    [
        ("rms_norm", "rms_norm", "* factor * weight[i]", "* weight[i]", "forward: out[0, 0] is"),
        ("rms_norm", "rms_norm", "i < cols; i += blockDim.x) out", "i <= cols; i += blockDim.x) out", "invalid memory"),
        ("quantise_rows", "quantise_rows", "__float2int_rn(in[k] * inverse)", "(int)(in[k] * inverse)", "codes[0, "),
        ("swiglu", "expert_ffn", " * up[at]", "", "hidden[0, 0] is"),
        ("finish_logits", "head", "best = min(best, __shfl", "best = max(best, __shfl", "argmax[0] is"),
        ("matmul", "matmul", "word >> 4 & 0x0f0f0f0fu), high", "word >> 4 & 0x0f0f0f0fu), low", "y[0, 0] is"),
    ],
)
def test_wrong_changes_are_found(name: str, file: str, old: str, new: str, says: str) -> None:
    assert says in str(check(EXAMPLES[name](), changed(file, old, new)))


def test_an_order_that_changes_bits_alone_is_found() -> None:
    """Near enough to the reference in every order; but the last thread to come decides what is added first."""
    old = "for (int w = 0; w < warps; ++w) sum += room[w];"
    last = "room[warps] = (float)warp;\n  __syncthreads();\n  for (int w = 0; w < warps; ++w) "
    new = last + "sum += room[(w + (int)room[warps]) % warps];"
    example = replace(norm(rows=6, cols=3000, threads=256), shared=36)
    assert "in the first order" in str(check(example, changed("rms_norm", old, new)))


def test_a_change_that_changes_nothing_is_right() -> None:
    assert check(norm(), changed("rms_norm", "const float factor", "const  float factor")).right


def test_a_change_has_to_be_there() -> None:
    with pytest.raises(ValueError, match="have 0 times 'nowhere', not 1"):
        changed("rms_norm", "nowhere", "")
    with pytest.raises(ValueError, match=r"have 4 times .*, not 10"):
        changed("rms_norm", "__syncthreads();", "", 9)
    assert "rms_norm(" in source("rms_norm.cu")
    with pytest.raises(FileNotFoundError, match=r"nothing\.cu"):
        source("nothing.cu")


def test_what_does_not_compile_and_what_takes_something_else() -> None:
    with pytest.raises(KernelError, match=r"rms_norm\.cu:\d+.*nonsense"):
        check(norm(), changed("rms_norm", "const float factor", "nonsense factor"))
    with pytest.raises(ValueError, match="rms_norm: the changed text takes other parameters"):
        check(norm(), changed("rms_norm", "int cols, float eps) {", "float eps, int cols) {", 1))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No C compiler at all, and one that has no C++: each says what to install."""
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    lame = tmp_path / "cc"
    lame.write_text("#!/bin/sh\necho 'cc: fatal error: cannot execute cc1plus' >&2\nexit 1\n")
    lame.chmod(0o755)
    monkeypatch.setenv("CC", str(lame))
    with pytest.raises(KernelError, match=r"needs a C\+\+ compiler; .*apt install g\+\+"):
        check(norm())
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(KernelError, match="no C compiler"):
        check(norm())


def test_an_example_says_what_it_gives() -> None:
    one = norm()
    with pytest.raises(ValueError, match="rms_norm: other are wanted, out are left open"):
        Example(one.kernel, one.grid, one.threads, one.arguments, {"other": np.zeros(1)})
