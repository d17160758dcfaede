"""Sections that say whether a card computes what the CPU does."""

from __future__ import annotations

import platform
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from colibri_lab.engine.sampling import Sampler, Sampling
from colibri_lab.ops import gpu
from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.cuda_sample import Chooser, Draw
from colibri_lab.ops.examples import EXAMPLES
from colibri_lab.ops.launch import FILE_OF, KERNELS, Kernels
from colibri_lab.ops.products import upload
from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.routing import KINDS, Routing
from tests.cuda.test_backend import same
from tests.cuda.whole import WholeBound
from tests.ops.models import Shape, make
from tests.ops.test_kernels import limit_of
from tests.parity.models import engine, greedy, logits

from .machine import Machine
from .rows import Rows

PROMPT = [5, 9, 33, 2, 60, 17, 8]
WHOLE = [[(0, 4), (2, 6)], [(1, 3), (0, 7)]]
SANITIZER = "compute-sanitizer"


def environment(m: Machine, put: Rows) -> None:
    """Card, driver, versions."""
    put("machine", f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}")
    for check in gpu.checks():
        put(check.what, check.says)
    driver = m.driver()
    facts = driver.facts()
    driver.close(False)
    put("card", facts.name)
    put("memory", facts.memory / 2**30, "GiB")
    put("compute capability", f"{facts.capability[0]}.{facts.capability[1]}")
    for package in ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc"):
        if (version := _version(package)) is not None:
            put(package, version)
    if tool := shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.current"
        said = subprocess.run([tool, asked, "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
        put("nvidia-smi", said.stdout.strip() or said.stderr.strip()[:200])


def compiled(m: Machine, put: Rows) -> None:
    """Every file, and what that took; a driver keeps them for the process."""
    driver = m.driver()
    for file in KERNELS:
        begin = perf_counter()
        m.compile(driver, file)
        put(f"{file}.cu", perf_counter() - begin, "s")
    driver.close(False)


def kernels(m: Machine, put: Rows) -> None:
    """Every kernel against the reference: whole models, single launches, sampled tokens."""
    ran: set[str] = set()
    for name, shape in m.sizes.shapes.items():
        for precision in ("exact", "fast"):
            for kind in KINDS if shape.experts > 2 and not name.startswith("large") else KINDS[:1]:
                ran |= _compared(m, put, name, shape, precision, kind)
    for name, example in EXAMPLES.items():
        with m.device() as device:
            one = example()
            wrong = one.differences(one.run(device))
        put(f"{name} alone", "; ".join(wrong) or "right", "")
        if wrong:
            raise AssertionError(f"{name}: {wrong[0]}")
        ran.add(one.kernel)
    for vocab in m.sizes.vocab:
        _sampled(m, put, vocab)
    ran.add("sample")
    put("kernels that ran", len(ran))
    if len(m.sizes.shapes) > 1 and set(FILE_OF) - ran:
        raise AssertionError(f"did not run: {', '.join(sorted(set(FILE_OF) - ran))}")


def _compared(m: Machine, put: Rows, name: str, shape: Shape, precision: str, kind: str) -> set[str]:
    weights, pages = make(shape, 3, poison=0xFF)
    bound: list[WholeBound] = []
    with m.device() as device:
        backend = CudaBackend(device, precision)
        for one in (backend, ReferenceBackend(precision)):
            routing = Routing.make(shape.layers, kind, 9, audit=True)
            bound.append(WholeBound(one, shape, model=(replace(weights, routing=routing), pages)))
        same(bound[0], bound[1], precision)
        if not backend.graphless():
            bound[0].bring()
            for step in WHOLE:  # the first goes launch by launch, the second is a replay
                got, want = bound[0].step_whole(step), bound[1].step(step)
                assert np.abs(got - want).max() <= limit_of(shape, precision) * np.abs(want).max(), "at one go"
            assert backend.whole.graphs.replays == 1
        put(f"{name}, {precision}, {kind}", "equal to the reference within its limits")
        return set(backend.kernels.launches)


def _sampled(m: Machine, put: Rows, vocab: int, rows: int = 24) -> None:
    rng = np.random.default_rng(vocab)
    values = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    how: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.2, "min_p": 0.05, "top_p": 0.95},
        {"repetition_penalty": 1.2},
    ]
    seen = [int(row.argmax()) for row in values]
    with m.device() as device:
        chooser = Chooser(Kernels(device), vocab, rows, rows)
        for seat in range(rows):
            chooser.begin(seat, [seen[seat]])
        draws = [Draw(**how[r % 4], random=random.Random(r).random()) for r in range(rows)]
        token, sure, _ = chooser.choose(upload(device, values), list(range(rows)), draws)
    want = [Sampler(Sampling(**how[r % 4], seed=r), [seen[r]]).choose(values[r]) for r in range(rows)]
    wrong = [r for r in range(rows) if sure[r] and token[r] != want[r]]
    put(f"sampled tokens of {vocab}", f"{int(sure.sum())} of {rows} surely the sampler's, {len(wrong)} wrong")
    if wrong:
        raise AssertionError(f"row {wrong[0]} of {vocab}: {token[wrong[0]]} is not {want[wrong[0]]}")


def engines(m: Machine, put: Rows) -> None:
    """The whole engine in `exact`: tokens and logits beside the CPU's, and under settings that may change no token."""
    said, scores = {}, {}
    for backend in ("cpu", m.backend):
        with engine(m.model, backend=backend) as made:
            said[backend], scores[backend] = greedy(made, PROMPT, m.sizes.tokens), logits(made, PROMPT)
    far = float(np.abs(scores[m.backend] - scores["cpu"]).max() / np.abs(scores["cpu"]).max())
    put("tokens equal to the CPU's", said[m.backend] == said["cpu"])
    put("logits: farthest, of the largest", far, "", most=1e-5)
    if said[m.backend] != said["cpu"]:
        at = next(i for i, pair in enumerate(zip(*said.values(), strict=True)) if pair[0] != pair[1])
        raise AssertionError(f"token {at} differs from the CPU's")
    for settings in ({"prefill_chunk": 2}, {"router": "two_stage"}, {"engine_mode": "async"}):
        with engine(m.model, backend=m.backend, **settings) as made:
            name = ", ".join(f"{key}: {value}" for key, value in settings.items())
            equal = np.array_equal(logits(made, PROMPT), scores[m.backend])
            put(f"{name}: the same bits", bool(equal))
            assert equal, name


def sanitizer(m: Machine, put: Rows) -> None:
    """NVIDIA's own checks of memory, races and barriers over the kernels, where the tool is there."""
    tool = shutil.which(SANITIZER) or next(map(str, Path("/usr/local").glob(f"cuda*/bin/{SANITIZER}")), None)
    if tool is None:
        put(SANITIZER, "is not here: it comes with the CUDA toolkit")
        return
    for check in ("memcheck", "racecheck", "synccheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.sanitized"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        said = (ran.stdout + ran.stderr).strip().splitlines() or ["nothing"]
        put(check, said[-1][:160])
        assert ran.returncode == 0, f"{check}: {said[-1][:300]}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
