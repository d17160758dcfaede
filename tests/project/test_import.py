"""Importing the package is quick and loads nothing heavy; each measurement in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

HEAVY = (
    "cupy",
    "plotly",
    "torch",
    "transformers",
    "ipywidgets",
    "anywidget",
    "IPython",
    "llama_cpp",
    "pydantic",
    "rich",
)
PROGRAM = """
import json, sys, time
cpu, wall = time.process_time(), time.perf_counter()
import {module}
spent = {{"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}}
print(json.dumps({{"modules": sorted({{m.split(".")[0] for m in sys.modules}}), **spent}}))
"""


def imported(module: str, top: Path) -> dict[str, object]:
    program = f"import sys; sys.path.insert(0, {str(top)!r})\n" + PROGRAM.format(module=module)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def test_import_is_light(top: Path) -> None:
    modules = imported("colibri_lab", top)["modules"]
    assert isinstance(modules, list)
    assert not [name for name in HEAVY if name in modules]


def test_the_check_sees_a_heavy_module(top: Path) -> None:
    modules = imported("ipywidgets", top)["modules"]
    assert isinstance(modules, list)
    assert "ipywidgets" in modules


def test_import_is_quick(top: Path) -> None:
    """At most 0.3 s. Processor time, so that a busy machine does not fail it; the median of five."""
    spent = [imported("colibri_lab", top)["cpu"] for _ in range(5)]
    assert statistics.median(float(str(s)) for s in spent) <= 0.3


def test_the_engine_needs_no_display(top: Path) -> None:
    """Loading and generating works where nothing of Jupyter is imported."""
    program = (
        f"import sys; sys.path.insert(0, {str(top)!r})\n"
        "import colibri_lab\n"
        "with colibri_lab.Engine.load(colibri_lab.embedded_model(), backend='reference') as engine:\n"
        "    assert len(list(engine.generate('Emma was', max_tokens=2))) == 2\n"
        "print(' '.join(m for m in ('IPython', 'ipywidgets', 'plotly', 'anywidget', 'torch') if m in sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
