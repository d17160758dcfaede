"""How little memory `colibri-lab generate` takes with the embedded model, and how much of it is Python's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_lab.bench.result import Result
from colibri_lab.engine.engine import Engine
from colibri_lab.paths import embedded_model

GOAL = 120e6  # bytes resident
KINDS = ("VmHWM", "RssAnon", "RssFile")  # peak of all; peaks of anonymous and of file-backed memory
STARTS = {  # what runs before there is a model: code that then waits to be looked at
    "interpreter": "",
    "interpreter and NumPy": "import numpy",
    "all imports of generate": "import colibri_lab.cli, colibri_lab.engine.engine, colibri_lab.telemetry, tokenizers",
}


@dataclass(frozen=True)
class Plan:
    """The text that is generated."""

    prompt: str = "The young lady"
    tokens: int = 200


def run(plan: Plan) -> Result:
    """Child processes one after another, looked at two hundred times a second. ValueError without /proc."""
    if not Path("/proc/self/status").exists():
        raise ValueError("footprint reads /proc/PID/status, which this system does not have")
    result = Result("footprint embedded")
    for name, code in STARTS.items():
        python = started(code)
        _add(result, name, python)
    said = set()
    for name, settings in (("generate", {}), ("generate, least settings", least_settings())):
        found, out = peaks(_generate(plan, settings))
        said.add(json.loads(out)["text"])
        _add(result, name, found)
        result.add(f"{name}: imports' part", 100 * python["VmHWM"] / found["VmHWM"], "% of resident")
        result.notes.append(f"{name}: {' '.join(f'{k}={v}' for k, v in settings.items()) or 'defaults'}")
    if len(said) != 1:
        raise RuntimeError("the settings changed the text")
    result.notes.append(
        f"{plan.tokens} tokens; peaks of resident memory (1 MB is 1e6 bytes), of its anonymous part, and of the pages "
        f"of files, which other processes share; the goal is {GOAL / 1e6:.0f} MB resident"
    )
    return result


def least_settings() -> dict[str, str]:
    """Settings under which the embedded model takes as little memory as it can; the text is the same."""
    with Engine.load(embedded_model()) as engine:
        facts = engine.describe()
        budget = facts["top_k"] * facts["expert_bytes"]
    chosen = {"expert_cache_bytes": budget, "telemetry": "false", "threads": 1, "max_batch_size": 1, "prefill_chunk": 8}
    return {name: str(value) for name, value in chosen.items()}


def started(code: str) -> dict[str, int]:
    """KINDS in bytes of an interpreter that has run `code` and waits."""
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        found = _memory(child.pid)
        child.stdin.write("\n")
    return found


def peaks(command: Sequence[str]) -> tuple[dict[str, int], str]:
    """(the largest of each of KINDS in bytes, standard output) of a child process. RuntimeError when it fails."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most = dict.fromkeys(KINDS, 0)
    try:
        while child.poll() is None:
            now = _memory(child.pid)
            most = {kind: max(most[kind], now.get(kind, 0)) for kind in KINDS}
            time.sleep(0.005)
        out, errors = child.communicate()
    finally:
        child.kill()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {child.returncode}: {errors.strip()[-300:]}")
    return most, out


def _generate(plan: Plan, settings: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", "colibri_lab", "generate", "--prompt", plan.prompt, "--json"]
    command += ["--max-tokens", str(plan.tokens)]
    return command + [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def _add(result: Result, name: str, found: dict[str, int]) -> None:
    for kind, what in zip(KINDS, ("resident", "anonymous", "of files"), strict=True):
        result.add(f"{name}: {what}", found[kind] / 1e6, "MB")


def _memory(pid: int) -> dict[str, int]:
    """Bytes of each line of /proc/PID/status that has kilobytes; nothing when the process has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): 1024 * int(value) for name, value, _ in parts}
