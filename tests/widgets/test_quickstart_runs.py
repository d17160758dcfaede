"""The quickstart by every way there is: a plain script, and a kernel without a page; on few and many threads, with a
disk that is slow. Its numbers are asserted in its own cells.

papermill is no part of the environment; what it runs a notebook with is nbclient's client, which is used here, with a
cell of parameters put in front as papermill does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TOP = Path(__file__).resolve().parents[2]
QUICKSTART = TOP / "notebooks" / "00_quickstart.ipynb"
SAID = "the same text, and at most one read for each expert"
SLOW = Path(__file__).parent / "slow_disk"
PROVED = (
    "import sitecustomize\nassert sitecustomize.reads > 100 and lab.engine.describe()['reads'].startswith('threads')"
)


def told(book: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))


@pytest.mark.parametrize("threads", [1, 8])
def test_as_a_script(tmp_path, threads):
    cells = [cell.source for cell in nbformat.read(QUICKSTART, 4).cells if cell.cell_type == "code"]
    script = tmp_path / "quickstart.py"
    script.write_text("\n".join(cells))
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(TOP)}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert SAID in done.stdout


@pytest.mark.parametrize("disk", ["as it is", "slow"])
def test_as_papermill_runs_it(tmp_path, monkeypatch, disk):
    folders = [str(SLOW), str(TOP)] if disk == "slow" else [str(TOP)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    book = nbformat.read(QUICKSTART, 4)
    given = nbformat.v4.new_code_cell("# Parameters\nunused = 1", metadata={"tags": ["injected-parameters"]})
    book.cells.insert(1, given)
    if disk == "slow":
        book.cells.append(nbformat.v4.new_code_cell(PROVED))
    NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert SAID in told(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert not any(output.get("name") == "stderr" for cell in code for output in cell.outputs)
