"""All that only a GPU can show, in at most eight minutes: python -m tests.gpu.run_all --out DIR [SECTION...]

Each section is a process of its own, since an error of CUDA ends a process's use of the card; what it finds is written
at once to DIR/SECTION.jsonl, and after each section DIR/results.json and DIR/summary.md are made anew. Exit code: 0 all
sections ended well (targets may be missed: the summary says so), 1 some did not, 2 no GPU to use here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from colibri_lab.ops import gpu
from colibri_lab.paths import embedded_model

from . import proof, rows, speed
from .machine import Machine, card
from .rows import Rows
from .shapes import LARGE

TOP = Path(__file__).resolve().parents[2]
SECONDS = 8 * 60.0
Section = Callable[[Machine, Rows], None]
# name -> what it does, and the most seconds that it gets
SECTIONS: dict[str, tuple[Section, float]] = {
    "environment": (proof.environment, 30),
    "compile": (proof.compiled, 60),
    "ceilings": (speed.ceilings, 30),
    "kernels": (proof.kernels, 150),
    "engine": (proof.engines, 60),
    "speed": (speed.each_kernel, 120),
    "attention": (speed.attention, 30),
    "decode": (speed.decode, 120),
    "half": (speed.half, 90),
    "paging": (speed.paging, 60),
    "sanitizer": (proof.sanitizer, 120),
}
CALL = (sys.executable, "-m", "tests.gpu.run_all")


def run(name: str, machine: Machine, folder: Path) -> bool:
    """One section here; whether it ended well. Its last row says why not."""
    put = Rows(folder, name)
    try:
        SECTIONS[name][0](machine, put)
    except Exception as error:
        traceback.print_exc()
        put("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
        return False
    return True


def run_all(folder: Path, names: Sequence[str], call: Sequence[str] = CALL, seconds: float = SECONDS) -> bool:
    """All sections, each in a process that `call` starts; whether all ended well within `seconds` together."""
    begin, ended = monotonic(), dict[str, str]()
    for name in names:
        left = seconds - (monotonic() - begin)
        if left < 5:
            ended[name] = "not begun: the time was up"
        else:
            ended[name] = _child([*call, "--out", str(folder), "--section", name], min(left, SECTIONS[name][1]), folder)
        took = monotonic() - begin
        print(f"{took:5.0f} s  {name}: {ended[name]}", flush=True)
        report(folder, ended, took)
    return all(said == "done" for said in ended.values())


def _child(command: Sequence[str], seconds: float, folder: Path) -> str:
    with (folder / "log.txt").open("a") as log:
        log.write(f"--- {' '.join(command[-2:])}\n")
        log.flush()
        child = subprocess.Popen(command, cwd=TOP, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:  # with what it has started; after Ctrl-C too
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return "done" if code == 0 else f"failed (exit code {code}; see log.txt)"


def report(folder: Path, ended: dict[str, str], seconds: float) -> None:
    """results.json and summary.md of what there is so far."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    found = {name: rows.read(folder, name) for name in ended}
    sections = [
        {"section": name, "ended": ended[name], "rows": [asdict(row) | {"met": row.met} for row in found[name]]}
        for name in ended
    ]
    rows.write(folder / "results.json", json.dumps({"when": when, "seconds": seconds, "sections": sections}, indent=1))
    lines = [f"# On a GPU, {when}", ""]
    for name, some in found.items():
        lines += [f"## {name}: {ended[name]}", "", *(f"- {row.line()}" for row in some), ""]
    rows.write(folder / "summary.md", "\n".join(lines))


def ceilings(folder: Path) -> dict[str, float]:
    """GB/s that the section of this name has measured."""
    return {row.what: row.value for row in rows.read(folder, "ceilings") if isinstance(row.value, float)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run_all", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for what is found")
    parser.add_argument("--section", choices=tuple(SECTIONS), help="one section, in this process")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    lacking = gpu.trouble()
    if lacking is not None:
        print(f"no GPU to use here: {lacking.says}; {lacking.do}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    if given.section:
        machine = card(LARGE, embedded_model(), ceilings(given.out))
        return 0 if run(given.section, machine, given.out) else 1
    return 0 if run_all(given.out, given.sections or tuple(SECTIONS)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
