"""`bench load`, `kernels`, `budget`, `scaling`, `convert`, and peers: what they print, and what they refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.bench import budget, conversion, kernels, main, memgroup, ours, scaling, start
from colibri_lab.bench.budget import Plan as BudgetPlan
from colibri_lab.bench.decode import _same_level, kernels_for
from colibri_lab.bench.memgroup import MemoryGroup
from colibri_lab.bench.shapes import SHAPES
from colibri_lab.convert import convert
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import NotAvailable
from colibri_lab.ops.isa import available
from colibri_lab.paths import embedded_model


def rows_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    form = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return {row["what"]: row for row in form["rows"]}


def test_prefill_looks_at_the_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "prefill.html"
    small = ["--shape", "nano", "--tokens", "40", "--rounds", "2", "--chunk", "16", "--html", str(page)]
    assert main(["prefill", *small, "--json"]) in (0, 3)
    rows = rows_of(capsys)
    assert not any(what.startswith("decode") for what in rows)
    speed = rows["prompt, 1 thread, CPU time"]["value"]
    operations = rows["multiplications and additions of ours"]["value"]
    assert operations == pytest.approx(speed * SHAPES["nano"].operations / 1e9, rel=1e-3)
    text = page.read_text()
    assert "colibri-lab bench prefill" in text and "in steps of 16" in text


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    for model in (str(embedded_model()), str(ours.make_model(SHAPES["nano"], 0))):
        assert main(["decode", "--model", model, "--rounds", "2", "--tokens", "4", "--prompt", "8", "--json"]) in (0, 3)
        rows = rows_of(capsys)
        assert rows["decode, 1 thread, CPU time"]["value"] > 0
    nano, seen = SHAPES["nano"], ours.given(ours.make_model(SHAPES["nano"], 0))
    assert seen.operations == nano.operations and (seen.vocab, seen.positions) == (nano.vocab, nano.positions)
    assert nano.active_bytes < seen.active_bytes < 1.5 * nano.active_bytes  # whole pages of experts


def test_operations_are_two_a_weight() -> None:
    nano = SHAPES["nano"]
    attention, experts = 2 * (4 + 2) * 64 * 256, 2 * 3 * 256 * 256
    assert nano.operations == 2 * nano.layers * (attention + experts + nano.experts * 256)


def test_the_level_is_forced_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_ISA", available()[0])
    with kernels_for("plain"), Engine.load(ours.make_model(SHAPES["nano"], 0), threads=1) as engine:
        assert engine.describe()["isa"] == "plain"
    assert os.environ["COLIBRI_ISA"] == available()[0]
    with kernels_for(None):
        assert os.environ["COLIBRI_ISA"] == available()[0]


def test_a_peer_with_wider_vectors_is_refused() -> None:
    class Fake:
        name, python, settings = "llama.cpp", "there", "built with AVX AVX2 AVX512 FMA"

    _same_level(None, Fake())  # type: ignore[arg-type]
    with pytest.raises(NotAvailable, match=r"not a llama.cpp built for AVX2.*GGML_NATIVE=OFF"):
        _same_level("avx2", Fake())  # type: ignore[arg-type]
    Fake.settings = "built with AVX AVX2 FMA"
    _same_level("avx2", Fake())  # type: ignore[arg-type]
    Fake.name, Fake.settings = "transformers", "torch's kernels AVX512"  # its child sees to it, and says so
    _same_level("avx2", Fake())  # type: ignore[arg-type]


def test_kernels_of_all_levels_give_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--shape", "nano", "--batches", "1,8", "--rounds", "2", "--json"]) in (0, 3)
    rows = rows_of(capsys)
    for level in available():
        assert rows[f"experts, 1 row, {level}"]["unit"] == "GB/s" and rows[f"head, {level}"]["value"] > 0
        assert rows[f"experts, 8 rows, {level}"]["unit"] == "GOP/s"
    scattered = rows[f"experts, 1 row, {kernels.SCATTERED}"]
    assert scattered["peer"] == "contiguous" and scattered["peer_value"] == pytest.approx(
        rows["experts, 1 row, contiguous"]["value"], rel=1e-3
    )


def test_kernels_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = kernels.scattered

    def swapped(*given: Any) -> Any:
        pages = sound(*given)
        pages.table[0, 0] = pages.table[0, 1].copy()
        return pages

    monkeypatch.setattr(kernels, "scattered", swapped)
    with pytest.raises(RuntimeError, match="other bits"):
        kernels.run(kernels.Plan(SHAPES["nano"], (1,), ("plain",), 1))


def test_load_counts_from_the_start_of_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    for shape in ("embedded", "nano"):
        assert main(["load", "--shape", shape, "--rounds", "1", "--json"]) in (0, 3)
        rows = rows_of(capsys)
        part = [rows[f"of it: interpreter and {what}"]["value"] for what in ("NumPy", "all imports")]
        assert min(part) > 0 and 0 < rows["start to first token"]["value"] < 60


def test_a_start_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        start._first_output(["sh", "-c", "echo gone >&2; exit 3"])


def test_budget_reads_what_it_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--shape", "nano", "--share", "60", "--tokens", "12", "--rounds", "2", "--threads", "1"]
    assert main(["budget", *small, "--json"]) == 2  # the interpreter alone is more than nano
    assert f"--share 60: {BudgetPlan(SHAPES['nano'], 60).limit / 1e6:.0f} MB do not hold" in capsys.readouterr().err
    monkeypatch.setattr(budget, "PROCESS", 0)
    assert main(["budget", *small, "--json"]) in (0, 3)
    rows = rows_of(capsys)
    assert 20 < rows["experts in memory"]["value"] < 60
    for what in ("decode, cold, wall time", "decode, cold, routes of changing topics"):
        disk = rows["disk, experts in random order, four at a time"]["value"] * 1e3
        assert rows[what]["limit"] == pytest.approx(disk / rows[f"{what}: read"]["value"], rel=1e-3)
        assert 0 < rows[what]["value"] and rows[f"{what}: hits"]["value"] < 100


def test_a_memory_group_holds_or_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    with MemoryGroup(1 << 20, tmp_path) as group:
        assert (group.folder / "memory.limit_in_bytes").read_text() == str(1 << 20)
        group.take(17)
        assert (group.folder / "cgroup.procs").read_text() == "17"
        for file in group.folder.iterdir():  # in a real one they are not files
            file.unlink()
    assert not group.folder.exists()
    with pytest.raises(NotAvailable, match=r"a memory group cannot be made here \(No such file.*leave --peer out"):
        MemoryGroup(1, tmp_path / "nowhere")
    assert memgroup.ROOT.is_absolute()


def test_scaling_fits_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.exponent([1, 10, 100], [3, 30, 300]) == pytest.approx(1)
    assert scaling.exponent([1, 10, 100], [5, 5, 5]) == pytest.approx(0, abs=1e-9)
    small = ["--experts", "8,16", "--layers", "1,2", "--context", "512,1024", "--sequences", "1,4"]
    assert main(["scaling", *small, "--rounds", "2", "--tokens", "4", "--json"]) in (0, 3)
    rows = rows_of(capsys)
    assert rows["sequences 1 to 4: time"]["peer_value"] == 1
    assert 0.9 < rows["context 512 to 1024: memory"]["peer_value"] + 0.95 < 1.5
    assert rows["experts 16: memory"]["peer_value"] > rows["experts 8: memory"]["peer_value"]
    assert "terms that grow faster than the model's bytes" in rows
    assert not list(ours.folder().glob("scale-*"))


def test_convert_measures_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = conversion.write_checkpoint(SHAPES["nano"], tmp_path / "hf", 0)
    assert size == sum(2 * int(np.prod(sizes)) for sizes in conversion.tensors(SHAPES["nano"]).values())
    with Engine.load(convert(tmp_path / "hf", tmp_path / "out"), threads=1) as engine:
        assert len(list(engine.generate([3, 4], max_tokens=2))) == 2
    assert main(["convert", "--shape", "nano", "--rounds", "1", "--json"]) in (0, 3)
    rows = rows_of(capsys)
    assert rows["checkpoint"]["value"] == pytest.approx(size / 1e6, rel=1e-4)
    assert rows["input, wall time"]["value"] > 0 and rows["memory, anonymous"]["value"] > 10
    assert not list(ours.folder().glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kernels", "--levels", "mmx"], "--levels mmx: this processor runs"),
        (["kernels", "--shape", "nano", "--batches", "0"], "--batches: numbers from 1"),
        (["load", "--shape", "m9"], "is none of nano"),
        (["decode", "--model", "nowhere"], "nowhere"),
        (["decode", "--model", str(embedded_model()), "--peer", "llama.cpp"], "name a --shape, not a --model"),
        (["load", "--peer", "transformers"], "load compares with llama.cpp alone"),
        (["budget", "--peer", "transformers"], "budget compares with llama.cpp alone"),
        (["batch", "--peer", "llama.cpp", "--shape", "embedded"], "name a --shape"),
        (["batch", "--peer", "transformers"], "batch compares with llama.cpp alone"),
        (["kv", "--peer", "transformers"], "kv compares with llama.cpp alone"),
        (["scaling", "--only", "width"], "--only 'width' is none of experts"),
        (["scaling", "--layers", "4"], "--layers: at least two sizes"),
        (["convert", "--shape", "m9"], "is none of nano"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("colibri-lab: error: ") and says in error and error.count("\n") == 1
