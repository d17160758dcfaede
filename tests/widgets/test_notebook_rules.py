"""The shipped notebooks keep the house's rules: short cells, no classes, no outputs that need a kernel."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_readable(path):
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    assert "widgets" not in book.metadata
    first = book.cells[0]
    assert first.cell_type == "markdown"
    for words in ("You will see", "You will learn", "You need"):
        assert words in first.source
    assert "\nNext: " in [cell for cell in book.cells if cell.cell_type == "markdown"][-1].source
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs for cell in code[:-1]), "what is stored is the last picture alone"
    for cell in code:
        assert len(cell.source.splitlines()) < 15
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 10
        for output in cell.outputs:
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
    with_a_lab = any("Lab(" in cell.source for cell in code)
    assert with_a_lab == any("assert lab.error is None" in cell.source for cell in code)
    assert "<svg" in str(code[-1].outputs), "the last cell's picture is read without a kernel"
    stored = str([cell.outputs for cell in code])
    assert not re.search(r"0x[0-9a-f]{6}|/(home|root|tmp|work)/|http", stored)


def test_there_is_a_quickstart():
    assert "00_quickstart" in [path.stem for path in NOTEBOOKS]


def test_the_readme_lists_them_all_in_order():
    text = (NOTEBOOKS[0].parent / "README.md").read_text("utf8")
    assert re.findall(r"^\| \[.+?\]\((\w+\.ipynb)\) \| \d+ \|", text, re.MULTILINE) == [path.name for path in NOTEBOOKS]
