"""docs/cases.md is true: each test that it names exists, and every case of ours is in it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
TABLE = (TOP / "docs" / "cases.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)))
CASES = "A1 A2 A3 A4 A6 A7 A8 A10 B1 B6 B7 B10 C2 C3 C4 D1 D2 D3 D4 E5 E6 E7 F2 F3 G1 G2 G3 G5 H1 H2 H3 I2 I3".split()


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TOP / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_exists(file: str, name: str) -> None:
    assert name in names_in(file)


def test_every_case_has_a_row() -> None:
    rows = re.findall(r"^\| ([A-I]\d+) ", TABLE, re.MULTILINE)
    assert rows == CASES


def test_every_row_has_a_test_or_says_whose_it_is() -> None:
    for row in re.findall(r"^\| .+ \|$", TABLE, re.MULTILINE):
        if not row.startswith(("| case", "| ---")):
            assert "`tests/" in row or "issue" in row, row


def test_our_case_tests_are_all_named() -> None:
    for file in sorted((TOP / "tests" / "cases").glob("test_*.py")):
        for name in names_in(f"tests/cases/{file.name}"):
            if re.match(r"test_[a-i]\d+_", name):
                assert any(name == n for _, n in NAMED), name
