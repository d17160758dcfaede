"""Plant bugs in CUDA kernels and in who launches them, one at a time, and see that the checks find each:
python -m tests.cuda.mutants [N...]

A mutant is caught when a result differs from the reference, between thread orders, or between a step at one go and
layer by layer, or when the simulator stops it. Ends with 1 if one lives. Not part of `make test`: minutes of compiling.
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
import pytest

from colibri_lab.convert import convert
from colibri_lab.ops import launch, simulator
from colibri_lab.ops.build import KernelError
from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.routing import Routing
from colibri_lab.ops.simulator import SimDevice
from tests.makers import make as make_checkpoint
from tests.ops.models import Bound, make

from . import test_choosing, test_graphs, test_sample
from .mutations import MUTANTS, SAMPLE, Mutant

FOUND = 3  # exit code of a child
TOP = Path(__file__).resolve().parents[2]


def planted(mutant: Mutant, folder: Path) -> None:
    """A copy of kernels and package with the bug in it."""
    for name in ("colibri_lab", "kernels"):
        shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / mutant.file if "/" in mutant.file else folder / "kernels/cuda" / mutant.file
    parts = path.read_text().split(mutant.old)
    assert len(parts) > mutant.nth + 1, f"{mutant.what}: {mutant.file} has no such text"
    path.write_text(mutant.old.join(parts[: mutant.nth + 1]) + mutant.new + mutant.old.join(parts[mutant.nth + 1 :]))


def check(mutant: Mutant) -> None:
    """Every order against the reference, and the orders against each other. Raises where they differ."""
    if how(mutant) != "model":
        {"sample": sampled, "whole": at_one_go, "choosing": chosen}[how(mutant)]()
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


def how(mutant: Mutant) -> str:
    """What looks for it."""
    return "sample" if mutant.file == SAMPLE else mutant.by


def sampled() -> None:
    test_sample.test_a_draw_on_an_edge_is_left_to_the_host()
    for seed, order in enumerate(simulator.ORDERS):
        test_sample.test_the_samplers_own_token(600 - seed, order)


def at_one_go() -> None:
    """Steps captured and replayed, beside steps layer by layer."""
    for experts in (3, 40):
        test_graphs.test_picks_are_planned_as_the_host_plans_them(5, experts)
    test_graphs.test_the_bits_of_the_steps_layer_by_layer("dense", "fast")
    test_graphs.test_what_a_graph_holds_is_captured_anew_when_it_changes()
    test_graphs.test_a_longer_history_is_another_graph()


def chosen() -> None:
    """An engine whose tokens the device chooses, beside one whose tokens the host does."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        path = convert(make_checkpoint("mixtral", 12).save(Path(name) / "hf"), Path(name) / "made", quantize="int4")
        said = test_choosing.hosts(path)
        test_choosing.test_the_hosts_text_and_no_logits_travel({"mixtral": path}, said, "on")
        test_choosing.test_logits_that_others_want_come_to_the_host({"mixtral": path}, said)
        test_choosing.test_both_sides_know_what_was_seen({"mixtral": path})
        test_choosing.test_where_it_is_not_sure_the_host_chooses({"mixtral": path}, said, patch)


def child(number: int) -> int:
    """FOUND where a check failed on the planted bug. What does not compile, or is not planted, is an error of ours."""
    simulator.FLAGS = tuple("-O0" if flag == "-O2" else flag for flag in simulator.FLAGS)  # compiling is what costs
    if number < 0:
        for mutant in {(m.shape, m.router, m.precision, how(m)): m for m in MUTANTS}.values():
            check(mutant)
        return 0
    assert Path(launch.__file__).is_relative_to(Path.cwd()), "the package is not the copy"
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
        with tempfile.TemporaryDirectory() as name:
            at = TOP if number < 0 else Path(name)
            if number >= 0:
                planted(MUTANTS[number], at)
            environment = os.environ | {"PYTHONPATH": f"{at}{os.pathsep}{TOP}"}
            ran = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, timeout=900)
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
