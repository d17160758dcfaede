"""`colibri-lab bench persist` on a shape that is small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colibri_lab.bench import main, ours


def test_memory_falls_and_a_restart_computes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "nano", "--tokens", "16384", "--rounds", "2", "--decode", "4", "--kv-dtype", "fp32"]
    code = main(["persist", *small, "--json"])
    form = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert code in (0, 3) and form["bench"] == "persist nano"
    rows = {row["what"]: row for row in form["rows"]}
    kv = 16383 * 2 * 2 * 64 * 2 * 4 / 1e6
    assert rows["of it: keys and values"]["peer_value"] >= kv > 3 * rows["of it: keys and values"]["value"]
    peak = rows["peak of anonymous memory, 16384 tokens"]
    assert peak["peer_value"] - peak["value"] > kv / 2 and rows["less anonymous memory"]["value"] > 15
    assert rows["slots in the file"]["share"] > 0.6
    assert rows["tokens restored"]["share"] == 1 and rows["prompt tokens computed"]["value"] == 2
    assert not list(Path(ours.folder()).glob("prefixes-*"))


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--shape", "m9"], "nano, m0, m1, m2"), (["--tokens", "1000"], "must be at least")]
)
def test_wrong_input(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["persist", *arguments]) == 2
    assert says in capsys.readouterr().err
