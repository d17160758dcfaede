"""Peak memory of a child is the budget, the resident weights, the KV cache and 200 MB; the page cache hides nothing."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.model.families import read_spec
from colibri_lab.model.plan import Piece, make_plan
from colibri_lab.model.store import ModelFile, write_model
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.pack import pack_codes
from tests.makers import base_config

ROOT = Path(__file__).parents[2]
BUDGET = 64 << 20
ALLOWED = 200_000_000  # beside budget, resident weights and KV: the interpreter, NumPy, the C library, scratch
SHAPE = {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 48, "num_hidden_layers": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of more than 600 MB of int4 experts, removed afterwards. Eight different experts, repeated."""
    config = base_config("mixtral", num_attention_heads=8, head_dim=64, max_position_embeddings=512, **SHAPE)
    spec = read_spec(config, "config.json")
    plan, rng = make_plan(spec, "int4", 32), np.random.default_rng(0)
    different = []
    for _ in range(8):
        run = np.zeros((plan.expert_pages, PAGE), np.uint8)
        for layout in plan.expert_layout:
            codes = rng.integers(1, 16, (layout.rows, layout.cols), np.uint8)
            scales = rng.uniform(0.5, 1.5, (layout.rows, layout.cols // 32)) / (4 * layout.cols**0.5)
            pack_codes(codes, scales.astype(np.float16), layout, run)
        different.append(run)

    def experts(layer: int, expert: int, out: np.ndarray[Any, Any]) -> None:
        out[:] = different[(layer + expert) % 8]

    def residents(piece: Piece) -> Iterator[np.ndarray[Any, Any]]:
        if piece.layout is None:
            dtype = {"F32": np.float32, "F16": np.float16}[piece.dtype]
            spread = 0.02 if "norm" in piece.name else 1.0
            mean = 1.0 if "norm" in piece.name else 0.0
            yield (mean + spread * rng.normal(size=piece.shape)).astype(dtype)
            return
        run, layout = np.zeros(piece.shape, np.uint8), piece.layout
        codes = rng.integers(1, 16, (layout.rows, layout.cols), np.uint8)
        pack_codes(codes, np.full((layout.rows, layout.cols // 32), layout.cols**-0.5 / 4, np.float16), layout, run)
        yield run

    path = tmp_path_factory.mktemp("budget") / "model.colibri"
    write_model(path, spec, "int4", 32, residents, experts)
    yield path
    path.unlink()


def run(model: Path, budget: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.budget.child", str(model), str(budget)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def cached(path: Path, extents: list[tuple[int, int]]) -> int:
    """Bytes of these extents that lie in the page cache; -1 where the system does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return -1
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        array = np.frombuffer(view, np.uint8)
        size, total = mmap.PAGESIZE, 0
        for offset, length in extents:
            pages = np.zeros(-(-length // size), np.uint8)
            at = ctypes.c_void_p(array.ctypes.data + offset)
            if libc.mincore(at, ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)):
                return -1
            total += int((pages & 1).sum()) * size
        del array
    return total


def drop(path: Path) -> None:
    """Take the file out of the page cache, where the system lets us."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def test_memory_stays_in_the_budget_and_reads_are_counted(model: Path) -> None:
    with ModelFile.open(model) as file:
        spec, expert_bytes, total = file.spec, file.expert_pages * PAGE, file.expert_bytes
        extents = [file.extent(layer, expert) for layer in range(spec.layers) for expert in range(spec.experts)]
    assert total >= 600_000_000
    drop(model)
    measurable = cached(model, extents) == 0
    small = run(model, BUDGET)
    if measurable:
        assert cached(model, extents) < 1 << 20, (
            "the experts must not stay in the page cache, where no budget counts them"
        )

    facts, pager = small["facts"], small["pager"]
    kv = small["kv"]["slots_peak"] * small["kv"]["slot_size"] * facts["kv_bytes_per_token"] // spec.layers
    assert pager["budget_bytes"] <= BUDGET and pager["frames"] * PAGE <= BUDGET
    assert small["peak"] <= BUDGET + facts["resident_bytes"] + kv + ALLOWED

    assert pager["evictions"] > 0 and pager["bytes_read"] == pager["faults"] * expert_bytes
    assert pager["faults"] - pager["evictions"] == pager["experts_resident"]
    if small["generating"] is not None:  # the kernel's own count of what was read
        assert small["counted"] <= small["generating"] <= small["counted"] + (1 << 20)

    large = run(model, total)
    assert large["tokens"] == small["tokens"] and len(set(small["tokens"])) > 1
    assert large["peak"] > small["peak"] + 300_000_000, "control: the measure sees a budget that is larger"
    assert large["pager"]["evictions"] == 0 and large["pager"]["bytes_read"] < pager["bytes_read"]


def test_least_budget_works_and_less_is_refused(model: Path) -> None:
    with ModelFile.open(model) as file:
        least = file.spec.top_k * file.expert_pages * PAGE
    command = [sys.executable, "-m", "tests.budget.child", str(model), str(least - 1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "expert_cache_bytes" in done.stderr and f"{least / 2**20:.4g} MiB" in done.stderr
    said = run(model, least)
    assert said["pager"]["frames"] * PAGE == least and len(said["tokens"]) > 0
