"""`bench plan`: predictions stand beside what the engine did under the same budget."""

from __future__ import annotations

import json

import pytest

from colibri_lab.bench import forecast, main
from colibri_lab.bench.shapes import SHAPES
from colibri_lab.planning.boards import Machine


def test_predicted_beside_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "--shape", "nano", "--budgets", "50,100", "--tokens", "40", "--rounds", "2"]
    assert main([*small, "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["what"]: row for row in found["rows"]}
    assert found["bench"] == "plan nano"
    half, whole = rows["50 % in memory: hit rate"], rows["100 % in memory: hit rate"]
    assert whole["value"] == whole["peer_value"] == 100 and 0.8 < half["ratio"] < 1.25
    assert rows["50 % in memory: wait for pages"]["value"] > 0 and "100 % in memory: wait for pages" not in rows
    speed = rows["100 % in memory: speed"]
    assert speed["peer"] == "predicted" and speed["ratio"] == pytest.approx(speed["value"] / speed["peer_value"], 1e-4)


def test_more_in_memory_is_predicted_to_be_faster() -> None:
    here = Machine("here", 0, 15e9, 1e9)
    speeds = [forecast.predicted(SHAPES["m1"], here, share, 32).tokens_per_s for share in (0.25, 0.5, 0.75, 1.0)]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "50,0"], "--budgets 0: per cent of all experts, 2 to 100"),
        (["--budgets", "half"], "--budgets 'half': whole numbers by commas"),
        (["--shape", "big"], "--shape 'big' is none of nano"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
