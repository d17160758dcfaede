"""A process that runs kernels on the simulator under one sanitizer: python -m tests.cuda.sanitized NAME [WHAT].

WHAT: all (every kernel at least once, the default), some (one model and router: threads cost gigabytes and minutes
for all), mistake (a kernel with one planted error). Ends with "clean"; a finding ends the process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from colibri_lab.ops import launch, simulator
from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.cuda_sample import Chooser, Draw
from colibri_lab.ops.launch import FILE_OF, KERNELS, Kernels
from colibri_lab.ops.products import upload
from colibri_lab.ops.routing import KINDS, Routing
from colibri_lab.ops.simulator import SimDevice, fenced
from tests.ops.models import Shape, make

from .whole import WholeBound

HEAD = """#include "common.cuh"
__global__ void __launch_bounds__(64)
tried(const float* __restrict__ x, float* __restrict__ out, int n) {
"""
# sanitizer -> what it alone is sure to see
MISTAKES = {
    "address": "  float a[4] = {};\n  for (int i = 0; i < n; ++i) a[i] = x[i];\n  out[threadIdx.x] = a[n / 16 - 1];\n",
    "undefined": "  out[threadIdx.x] = (float)(1 << (n - 32 + (int)threadIdx.x));\n",
    "thread": "  out[0] = x[threadIdx.x];\n",
}
SHAPES = {  # all formats of tiles and numbers, all widths of heads
    "small": Shape(layers=1, shared=9, bias=True, qk_norm="head", tied=True),
    "flat": Shape(dense=(1,), dtype="int8", qk_norm="flat", tied=True, kv_dtype="fp32", recent=2, sinks=1, head_dim=40),
    "half": Shape(layers=1, dtype="fp16", group=0, tied=True, head_dim=72),
    "single": Shape(layers=1, dtype="fp32", group=0, tied=True, head_dim=136),
    "plain": Shape(layers=1, kv_dtype="fp32"),
    "float": Shape(layers=1, kv_dtype="fp32", embedding="fp32", head_dim=72),
    "wide": Shape(layers=1, kv_dtype="fp32", head_dim=136),
    "middle": Shape(layers=1, head_dim=40),
}


def real(sanitizer: str, some: bool) -> set[str]:
    """The kernels of all models, or of the first; the names of those that ran."""
    ran: set[str] = set()
    for name, shape in list(SHAPES.items())[: 1 if some else None]:
        for kind in KINDS if name == "small" and not some else KINDS[:1]:
            for precision in ("exact", "fast") if name in ("small", "flat") else ("exact",):
                weights, pages = make(shape, 3)
                routing = Routing.make(shape.layers, kind, audit=True)
                backend = CudaBackend(SimDevice("random", 5, sanitizer), precision)
                bound = WholeBound(backend, shape, model=(replace(weights, routing=routing), pages))
                bound.step([(0, 3), (1, 4), (1, 7), (2, 5), (0, 9)])
                bound.step([(0, 2)])
                if not backend.graphless():
                    bound.bring()
                    bound.step_whole([(0, 6), (2, 1), (1, 8)])
                ran |= set(backend.kernels.launches)
    return ran


def sampled(sanitizer: str) -> set[str]:
    """The choice of tokens, which is no part of a model."""
    kernels, how = Kernels(SimDevice("random", 5, sanitizer)), Draw(0.9, 40, 0.8, 0.02, 1.1, 0.7)
    chooser = Chooser(kernels, 300, 2, 2)
    for seat in (0, 1):
        chooser.begin(seat, [seat, 7])
    logits = np.random.default_rng(5).standard_normal((2, 300)).astype(np.float32)
    chooser.choose(upload(kernels.device, logits), [1, 0], [how, Draw()])
    return set(kernels.launches)


def planted(sanitizer: str) -> None:
    """One mistake: the process should not survive it, or say what it saw."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(launch.kernels_dir() / "cuda", Path(folder) / "cuda")
        (Path(folder) / "cuda/tried.cu").write_text(HEAD + MISTAKES[sanitizer] + "}\n")
        KERNELS["tried"], FILE_OF["tried"] = ("tried",), "tried"
        launch.kernels_dir = lambda: Path(folder)
        x, out = fenced((64,), np.float32), fenced((64,), np.float32)
        x[:] = 1
        Kernels(SimDevice(sanitizer=sanitizer))("tried", (1, 1, 1), 64, x, out, 64)


def main() -> None:
    sanitizer = sys.argv[1]
    os.environ.pop("LD_PRELOAD", None)  # the compiler need not run under it
    assert sanitizer in simulator.SANITIZERS and os.environ["COLIBRI_CACHE"]
    what = sys.argv[2] if sys.argv[2:] else "all"
    assert what in ("all", "some", "mistake")
    if what == "mistake":
        planted(sanitizer)
    else:
        left = set(FILE_OF) - real(sanitizer, what == "some") - sampled(sanitizer)
        assert what == "some" or not left, f"did not run: {left}"
    print("clean", flush=True)


if __name__ == "__main__":
    main()
