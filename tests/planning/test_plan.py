"""`colibri-lab plan`: its bytes are the file's, its hit rates the simulator's, and wrong input is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from colibri_lab.analysis.accesses import recorded
from colibri_lab.analysis.simulate import simulate
from colibri_lab.cli import main
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError
from colibri_lab.model.families import read_spec
from colibri_lab.model.jsonfile import read_object
from colibri_lab.model.plan import Plan, make_plan
from colibri_lab.paths import embedded_model
from colibri_lab.planning.boards import BOARDS, Machine
from colibri_lab.planning.cost import forecast, needs, share_in_memory
from colibri_lab.planning.misses import assumed, hit_rate
from colibri_lab.telemetry import Recorder

CONFIG = str(embedded_model() / "config.json")
RATES = ["--ram", "100MB", "--dram", "16GB/s", "--disk", "1GB/s"]
HERE = Machine("here", 100e6, 16e9, 1e9)


@pytest.fixture(scope="module")
def layout() -> Plan:
    return make_plan(read_spec(read_object(Path(CONFIG)), CONFIG), "int4", 32)


def test_bytes_are_those_of_the_converted_model(layout: Plan) -> None:
    need = needs(layout, 256)
    with Engine.load(embedded_model(), threads=1) as engine:
        facts, file = engine.describe(), engine._parts.file
        assert need.expert == facts["expert_bytes"]
        assert need.experts * need.expert == facts["experts_total_bytes"]
        assert need.dense == sum(piece.nbytes for piece in file._plan.residents)
        pool = engine._parts.kv.pool
        row = pool.k[0].nbytes + pool.v[0].nbytes
        assert need.kv == need.kv_read == 256 * engine.spec.layers * row
    assert (need.uses, need.sparse, need.least) == (16, 8, 2)
    assert need.dense_read == need.dense  # tied: the head is the embedding
    windowed = Plan(replace(layout.spec, window=(100,) * 8), "int4", 32)
    assert needs(windowed, 256).kv_read == need.kv * 100 // 256 and needs(windowed, 50).kv_read == need.kv * 50 // 256


def test_hit_rates_are_the_simulator_s() -> None:
    trace = assumed(3, 12, 2, seed=5)
    rates = [hit_rate(trace, share) for share in (0.1, 0.3, 0.5, 0.8, 1.0)]
    assert rates == sorted(rates) and rates[-1] == 1.0 and 0 < rates[0] < 0.6
    half = replace(trace, steps=trace.steps[: len(trace.steps) // 2])
    whole, first = (simulate(part, 18, "lfru") for part in (trace, half))
    hits, faults = whole.hits - first.hits, whole.faults - first.faults
    assert hit_rate(trace, 0.5) == hits / (hits + faults)


def test_a_token_costs_its_bytes(layout: Plan) -> None:
    need = needs(layout, 256)
    all_there, half = (forecast(need, HERE, share, hits) for share, hits in ((1.0, 1.0), (0.5, 0.75)))
    assert all_there.seconds["disk"] == 0 and all_there.tokens_per_s == all_there.overlapped
    assert half.seconds["disk"] >= 4 * need.expert / HERE.disk and half.tokens_per_s < half.overlapped
    assert forecast(need, replace(HERE, disk=1e3), 0.5, 0.75).bound == "disk"
    slow = forecast(need, replace(HERE, dram=1e6), 1.0, 1.0)
    assert slow.bound == "memory" and slow.tokens_per_s < all_there.tokens_per_s
    assert forecast(need, replace(HERE, dram=1e15), 1.0, 1.0).bound == "calls"


def test_memory_holds_what_is_left_of_it(layout: Plan) -> None:
    need = needs(layout, 256)
    assert share_in_memory(need, HERE) == 1.0
    other = HERE.ram - share_in_memory(need, replace(HERE, ram=68e6)) * need.experts * need.expert
    assert other == pytest.approx(HERE.ram - 68e6 + need.dense + need.kv + 60e6)
    with pytest.raises(ConfigError, match=r"here: 0\.0\d GB of memory are missing: .*--context"):
        share_in_memory(need, replace(HERE, ram=60e6))


@pytest.mark.parametrize("board", BOARDS)
def test_boards(board: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model-config", CONFIG, "--board", board, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["experts_in_memory"] == found["hit_rate"] == 1.0 and found["seconds"]["disk"] == 0
    assert found["tokens_per_s"] == pytest.approx(1 / sum(found["seconds"].values()))
    assert main(["plan", "--model-config", CONFIG, "--board", board, "--ram", "67MB", "--disk", "100MB/s"]) == 0
    out = capsys.readouterr().out
    assert BOARDS[board].source in out and "67.0 MB for the engine" in out and "disk 0.1 GB/s" in out


def test_a_recorded_run_gives_its_own_hit_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "run.jsonl"
    with Engine.load(embedded_model(), threads=1) as engine, Recorder(engine.telemetry, trace):
        list(engine.generate("The young lady", max_tokens=40))
        rate = hit_rate(recorded(engine), 0.25)
    need = ["plan", "--model-config", CONFIG, *RATES[2:], "--ram", "71MB", "--trace", str(trace), "--json"]
    assert main(need) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["hit_rate"] < 1 and found["hit_rate"] != rate
    with Engine.load(embedded_model(), threads=1) as engine:
        list(engine.generate("The young lady", max_tokens=40))
        assert found["hit_rate"] == hit_rate(recorded(engine), found["experts_in_memory"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ram", "32GB"], "plan: --dram, --disk missing; or name a board with --board: rk3588-8gb"),
        (["--board", "pi"], "--board 'pi' is none of rk3588-8gb"),
        ([*RATES, "--disk", "fast"], "--disk 'fast': a size is like 32GB, a rate like 3GB/s"),
        ([*RATES, "--ram", "0"], "--ram '0': a size is like"),
        ([*RATES, "--context", "5000"], "--context 5000: the model has 1 to 1024 positions"),
        ([*RATES, "--quantize", "int3"], "--quantize: 'int3' is none of fp32"),
        ([*RATES, "--kv-dtype", "int8"], "--kv-dtype 'int8' is none of fp16, fp32"),
        ([*RATES, "--ram", "1MB"], "GB of memory are missing"),
        ([*RATES, "--trace", "no.jsonl"], "no.jsonl"),
        ([*RATES, "--model-config", "no.json"], "no.json: not there"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = [] if "--model-config" in arguments else ["--model-config", CONFIG]
    assert main(["plan", *named, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_another_model_s_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, config = tmp_path / "run.jsonl", tmp_path / "config.json"
    with Engine.load(embedded_model(), threads=1) as engine, Recorder(engine.telemetry, trace):
        list(engine.generate("The", max_tokens=2))
    config.write_text(json.dumps(json.loads(Path(CONFIG).read_text()) | {"num_local_experts": 4}))
    assert main(["plan", "--model-config", str(config), *RATES, "--trace", str(trace)]) == 2
    assert "16 experts, top-2; the config has 4, top-2" in capsys.readouterr().err
