"""`bench dispatch` and `bench pipeline`: what they print, that both modes say the same, and that others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench import main, pipeline
from colibri_lab.bench.shapes import SHAPES
from colibri_lab.bench.traffic import ImposedRouter, zipf_markov
from colibri_lab.engine.engine import Engine
from colibri_lab.events import PAGES, PageKind


def rows_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {row["what"]: row for row in json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]}


def test_dispatch_copies_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dispatch", "--steps", "5", "--rounds", "2", "--json"]) in (0, 3)
    rows = rows_of(capsys)
    assert rows["64 rows, groups of 8: copied"]["value"] == 0
    cost = rows["64 rows, one group: dispatch"]
    assert cost["unit"] == "us/token" and cost["value"] > 0 and cost["limit"] == 0.3
    assert rows["64 rows, groups of 8: stalls"]["value"] > 0 == rows["64 rows, one group: stalls"]["value"]
    assert rows["64 rows, groups of 8: largest ring fill"]["value"] == 50


def test_pipeline_compares_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "nano", "--batches", "1,3", "--budgets", "50,100", "--tokens", "6", "--rounds", "2"]
    assert main(["pipeline", *arguments, "--threads", "1", "--json"]) in (0, 3)
    rows = rows_of(capsys)
    for batch in (1, 3):
        for share in (50, 100):
            name = f"batch {batch}, {share} %"
            assert rows[f"{name}: async"]["ratio"] > 0 and rows[f"{name}: speed-up"]["limit"] >= 1
            alone = rows[f"{name}: speed-up, layer by layer"]["limit"]
            assert 1 <= alone <= rows[f"{name}: speed-up"]["limit"] + 1e-9
            assert rows[f"{name}: sync experts"]["value"] > 0 and rows[f"{name}: async attention"]["value"] > 0
        assert rows[f"batch {batch}, 50 %: sync io"]["value"] > 0 == rows[f"batch {batch}, 100 %: sync io"]["value"]
        assert rows[f"batch {batch}, 50 %: reads_arriving"]["value"] > 0


def test_a_routed_shape_chooses_for_itself() -> None:
    shape = replace(SHAPES["nano"], name="nano-routed", branch=0.5)
    result = pipeline.run(pipeline.Plan(shape, [50], [1], tokens=8, rounds=2, threads=1, prefetcher="next_gate"))
    rows = {row.what: row for row in result.rows}
    assert rows["batch 1, 50 %: recall"].value > 40 and rows["batch 1, 50 %: sync ahead"].ratio > 0
    traffic = zipf_markov(pipeline.make_model(shape, 0), shape, 50, 1)
    assert traffic.router is None and 3 <= min(traffic.prompts[0]) and len(set(traffic.prompts[0])) > 10


def test_a_layer_hides_its_own_reads_alone() -> None:
    pages = np.zeros(6, PAGES)
    pages["kind"] = [PageKind.FAULT] * 5 + [PageKind.EVICT]
    pages["layer"], pages["t_ns"] = [0, 0, 0, 1, 1, 1], [1, 1, 2, 5, 9, 9]
    pages["step"], pages["wait_ns"] = [3, 3, 3, 3, 4, 4], [2_000_000, 2_000_000, 4_000_000, 1_000_000, 9_000_000, 5]
    # layer 0 waits 6 ms in two waves and hides 3, layer 1 hides 1 ms of one step and 3 ms of the next
    assert pipeline.coverable(pages, 0.003) == pytest.approx(0.003 + 0.001 + 0.003)
    assert pipeline.coverable(pages[:0], 0.003) == 0


def test_pipeline_ends_when_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pipeline.Side.run

    def lying(side: pipeline.Side, prompts: list[list[int]], tokens: int) -> Any:
        block = run(side, prompts, tokens)
        side.said[-1][0] += side.engine.describe()["engine_mode"] == "async"
        return block

    monkeypatch.setattr(pipeline.Side, "run", lying)
    with pytest.raises(RuntimeError, match="batch 1, 100 %: async said other tokens than sync"):
        pipeline.run(pipeline.Plan(SHAPES["nano"], budgets=[100], batches=[1], tokens=3, rounds=1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pipeline", "--budgets", "many"], "--budgets 'many': whole numbers by commas"),
        (["pipeline", "--prefetcher", "oracle"], "--prefetcher 'oracle' is none of none, neighbour"),
        (["paging", "--engine-mode", "later"], "--engine-mode 'later' is neither sync nor async"),
    ],
)
def test_wrong_options(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_imposed_routes_do_not_depend_on_groups() -> None:
    routes = zipf_markov_routes(2, 8, 3, tokens=5, rows=4)
    assert routes.shape == (2, 20, 3) and all(len(set(row)) == 3 for row in routes.reshape(-1, 3).tolist())
    whole, parts = ImposedRouter(routes), ImposedRouter(routes)
    for _ in range(5):
        for layer in range(2):
            right = whole.select(layer, np.zeros((4, 8), np.float32))[0]
            split = [parts.select(layer, np.zeros((n, 8), np.float32))[0] for n in (1, 3)]
            assert (np.concatenate(split) == right).all()


def test_fill_uses_every_frame() -> None:
    with Engine.load(pipeline.make_model(SHAPES["nano"], 0), threads=1) as engine:
        engine.settings.expert_cache_bytes = engine.describe()["experts_total_bytes"] // 2
        pipeline.fill(engine)
        counted = engine.counters()["pager"]
        assert counted["frames_used"] == counted["frames"] and counted["evictions"] == 0
