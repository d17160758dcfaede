"""The simulator sees what a GPU would not forgive: each small kernel below has one mistake, and is caught."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops import launch, simulator
from colibri_lab.ops.build import KernelError
from colibri_lab.ops.launch import Kernels
from colibri_lab.ops.simulator import SimDevice, SimulatedFault, fenced

HEAD = """#include "common.cuh"
__global__ void __launch_bounds__(64)
tried(const float* __restrict__ x, float* __restrict__ out, int n) {
"""
READ = "  const int t = threadIdx.x;\n  float* room = clb_shared<float>();\n  room[t] = x[t];\n"


class Tried:
    """One kernel `tried(x, out, n)` on 64 threads, from a body, in its own folder."""

    def __init__(self, folder: Path, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.top, self.patch = folder, top, monkeypatch

    def __call__(self, body: str, order: str = "forward", seed: int = 1, shared: int = 256) -> np.ndarray[Any, Any]:
        where = self.folder / "cuda"
        if not where.exists():
            shutil.copytree(self.top / "kernels/cuda", where)
        (where / "tried.cu").write_text(HEAD + body + "}\n")
        for module in (launch, simulator):
            self.patch.setattr(module, "KERNELS", {"tried": ("tried",)})
        self.patch.setattr(launch, "FILE_OF", {"tried": "tried"})
        self.patch.setattr(launch, "kernels_dir", lambda: self.folder)
        x, out = fenced((64,), np.float32), fenced((64,), np.float32)
        x[:] = np.arange(64)
        Kernels(SimDevice(order, seed))("tried", (1, 1, 1), 64, x, out, 64, shared=shared)
        return out.copy()


@pytest.fixture
def tried(tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return Tried(tmp_path, top, monkeypatch)


def test_a_right_kernel_passes_in_every_order(tried: Tried) -> None:
    body = READ + "  __syncthreads();\n  out[t] = room[63 - t];\n"
    for order in ("forward", "backward", "random"):
        assert tried(body, order).tolist() == list(range(63, -1, -1))


def test_a_missing_barrier_shows_in_some_order(tried: Tried) -> None:
    """Shared memory is poisoned, so a read before the write is NaN."""
    body = READ + "  out[t] = room[63 - t];\n"
    assert all(np.isnan(tried(body, order)).any() for order in ("forward", "backward"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("  if (threadIdx.x < 32) __syncthreads();\n", r"__syncthreads at line 4 after 32 threads have left"),
        ("  if (threadIdx.x < 32)\n    __syncthreads();\n  else\n    __syncthreads();\n", "divergent __syncthreads"),
        ("  if (threadIdx.x & 1) return;\n  out[threadIdx.x] = warp_sum(x[threadIdx.x]);\n", "which has left"),
        ("  if (threadIdx.x < 16) out[0] = __shfl_xor_sync(0xffffu, x[0], 16);\n", "shuffle from lane 16 outside mask"),
        ("  out[threadIdx.x] = __shfl_sync(1u, x[0], 0);\n", "is not in its own mask"),
        ("  out[threadIdx.x + n] = 0.0f;\n", "invalid memory access"),
        ("  clb_shared<float>()[threadIdx.x + 64] = 0.0f;\n", "invalid memory access"),
        ("  if (threadIdx.x & 1)\n    __syncwarp();\n  else\n    out[0] = __ballot_sync(kAll, 1);\n", "divergent warp"),
        ("  if (threadIdx.x < 32) out[0] = __any_sync(kAll, 1);\n  else __syncthreads();\n", "after 32 threads"),
    ],
    ids=["left early", "two barriers", "lanes gone", "lane outside", "not in mask", "past the end", "past shared",
         "two operations", "half a block"],
)  # fmt: skip
def test_mistakes_are_named(tried: Tried, body: str, says: str) -> None:
    with pytest.raises(SimulatedFault, match=says):
        tried(body)


def test_a_fault_leaves_the_machine_usable(tried: Tried) -> None:
    with pytest.raises(SimulatedFault):
        tried("  out[threadIdx.x + n] = 0.0f;\n")
    assert tried("  out[threadIdx.x] = x[threadIdx.x];\n")[5] == 5


def test_what_does_not_compile_is_shown_with_its_line(tried: Tried) -> None:
    with pytest.raises(KernelError, match=r"tried\.cu:4.*nonsense"):
        tried("  nonsense;\n")
