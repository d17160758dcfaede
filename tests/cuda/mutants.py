"""Plant bugs in the CUDA kernels, one at a time, and see that the checks find each: python -m tests.cuda.mutants [N...]

A mutant is caught when a result differs from the reference or between thread orders, or the simulator or a sanitizer
stops it. Ends with 1 if one lives. Not part of `make test`: minutes of compiling.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from colibri_lab.ops import launch, simulator
from colibri_lab.ops.build import KernelError
from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.routing import Routing
from colibri_lab.ops.simulator import SimDevice
from tests.ops.models import Bound, make

from . import test_sample
from .mutations import MUTANTS, SAMPLE, Mutant

FOUND = 3  # exit code of a child
TOP = Path(__file__).resolve().parents[2]


def planted(mutant: Mutant, folder: Path) -> None:
    shutil.copytree(launch.kernels_dir() / "cuda", folder / "cuda")
    path = folder / "cuda" / mutant.file
    parts = path.read_text().split(mutant.old)
    assert len(parts) > mutant.nth + 1, f"{mutant.what}: {mutant.file} has no such text"
    path.write_text(mutant.old.join(parts[: mutant.nth + 1]) + mutant.new + mutant.old.join(parts[mutant.nth + 1 :]))


def check(mutant: Mutant) -> None:
    """Every order against the reference, and the orders against each other. Raises where they differ."""
    if mutant.file == SAMPLE:
        test_sample.test_a_draw_on_an_edge_is_left_to_the_host()
        for seed, order in enumerate(simulator.ORDERS):
            test_sample.test_the_samplers_own_token(600 - seed, order)
        return
    shape = mutant.shape
    weights, pages = make(shape, 21, poison=0xFF)
    if mutant.router == "int8_lut":  # equal experts, beside each other and in one lane
        for layer in weights.layers:
            layer.gate[1::2] = layer.gate[::2]
            layer.gate[32:64] = layer.gate[:32]
    bound = []
    for backend in (*(CudaBackend(SimDevice(o, 3), mutant.precision) for o in ("forward", "backward", "random")),
                    ReferenceBackend(mutant.precision)):  # fmt: skip
        routing = Routing.make(shape.layers, mutant.router, 12, audit=True)
        bound.append(Bound(backend, shape, model=(replace(weights, routing=routing), pages)))
    text = [(0, int(t)) for t in np.random.default_rng(5).integers(0, 70, min(shape.capacity, shape.positions - 1))]
    steps = [text] if shape.seats == 1 else [text[:9], [(1, 4)], [(0, 7), (1, 5), (2, 8)]]
    for step in steps:
        *got, want = (b.step(step) for b in bound)
        for one in got:
            assert np.array_equal(one, got[0]), "thread orders differ"
        assert np.abs(got[0] - want).max() <= 1e-3 * np.abs(want).max(), "logits differ from the reference"
        for b in bound[:-1]:
            n = len(step)
            assert np.array_equal(b.rows.experts[:n], bound[-1].rows.experts[:n]), "experts differ"
            assert np.array_equal(b.rows.argmax[:n], got[0].argmax(1)), "argmax differs"
            assert np.array_equal(b.kv.seen, bound[-1].kv.seen), "counters of attention differ"
            assert np.array_equal(b.weights.routing.counts, bound[-1].weights.routing.counts), "router counters differ"


def child(number: int) -> int:
    """FOUND where a check failed on the planted bug. What does not compile, or is not planted, is an error of ours."""
    simulator.FLAGS = tuple("-O0" if flag == "-O2" else flag for flag in simulator.FLAGS)  # compiling is what costs
    if number < 0:
        for mutant in {(m.shape, m.router, m.precision, m.file == SAMPLE): m for m in MUTANTS}.values():
            check(mutant)
        return 0
    with tempfile.TemporaryDirectory() as name:
        planted(MUTANTS[number], Path(name))
        launch.kernels_dir = lambda: Path(name)
        try:
            check(MUTANTS[number])
        except KernelError:
            raise
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            return FOUND
    return 0


def main() -> int:
    chosen = [int(n) for n in sys.argv[1:]] or range(-1, len(MUTANTS))
    wrong = 0
    for number in chosen:
        command = [sys.executable, "-m", "tests.cuda.mutants", "child", str(number)]
        ran = subprocess.run(command, cwd=TOP, env=os.environ, capture_output=True, text=True, timeout=900)
        crashed = ran.returncode < 0
        verdict = {0: "alive", FOUND: "found"}.get(ran.returncode, "found" if crashed else "error")
        said = (ran.stdout + ran.stderr).strip().splitlines() or ["crashed" if crashed else ""]
        name = MUTANTS[number].what if number >= 0 else "(no bug)"
        print(f"{number:3d} {verdict}  {name:48s} {said[-1][:110]}", flush=True)
        wrong += verdict != ("found" if number >= 0 else "alive")
    print(f"{len(chosen)} runs, {wrong} not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        raise SystemExit(child(int(sys.argv[2])))
    raise SystemExit(main())
