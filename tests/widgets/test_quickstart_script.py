"""The quickstart's cells in one plain script, with more threads than cores: nothing in them needs a kernel's loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat

QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "00_quickstart.ipynb"


def test_the_quickstart_as_a_script(tmp_path):
    cells = [cell.source for cell in nbformat.read(QUICKSTART, 4).cells if cell.cell_type == "code"]
    script = tmp_path / "quickstart.py"
    script.write_text("\n".join(cells))
    env = os.environ | {"OMP_NUM_THREADS": "8", "PYTHONPATH": str(QUICKSTART.parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "the same text, and at most one read for each expert" in done.stdout
