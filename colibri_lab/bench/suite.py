"""`colibri-lab bench all`: every benchmark in a process of its own, one after the other, its JSON collected."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from colibri_lab.bench.result import NOISY, Result, Row
from colibri_lab.errors import ConfigError
from colibri_lab.export import write

PEERED = ("decode", "prefill", "batch", "kv", "load", "budget")  # take --peer
BESIDE: Mapping[str, tuple[str, ...]] = {  # beside a peer: llama.cpp reads 32 K tokens in a quarter of an hour
    "kv": ("--lengths", "4096,16384"),
}
WHOLE: Mapping[str, tuple[str, ...]] = {  # gates that can be asked; at 82 % disk and processor take about as long
    "pipeline": ("--shape", "m2-routed", "--prefetcher", "next_gate+second_gate",
                 "--budgets", "50,75,82,90,100", "--tokens", "16"),
}  # fmt: skip
WRONG = 2  # exit code of a part that could not be measured
QUICK: Mapping[str, tuple[str, ...]] = {  # arguments for a look at every part in a few minutes; the figures are rough
    "decode": ("--shape", "m0", "--rounds", "3"),
    "prefill": ("--shape", "m0", "--rounds", "3"),
    "telemetry": ("--shape", "m0", "--rounds", "6"),
    "perplexity": ("--characters", "3000"),
    "router": ("--rows", "20000", "--random-rows", "5000", "--rounds", "4", "--characters", "2000", "--prompts", "3"),
    "paging": ("--budgets", "50", "--prefetchers", "none,next_gate", "--tokens", "48"),
    "dispatch": ("--steps", "60", "--rounds", "5"),
    "pipeline": ("--shape", "m0", "--budgets", "50,100", "--batches", "4", "--tokens", "8", "--rounds", "2"),
    "kv": ("--shape", "m0", "--lengths", "2048", "--rounds", "2", "--characters", "2000"),
    "persist": ("--shape", "m0", "--tokens", "4096", "--rounds", "2"),
    "batch": ("--shape", "m0", "--batches", "1,4", "--rounds", "1"),
    "jitter": ("--shape", "embedded", "--rounds", "1", "--tokens", "24"),
    "footprint": ("--tokens", "50"),
    "dashboard": ("--shape", "embedded", "--rounds", "3", "--block", "0.5", "--seconds", "2"),
    "plan": ("--shape", "m0", "--budgets", "50,100", "--tokens", "24", "--rounds", "2"),
    "load": ("--rounds", "2"),
    "kernels": ("--shape", "m0", "--batches", "1,8", "--rounds", "2"),
    "budget": ("--shape", "m1", "--tokens", "16", "--peer-tokens", "2", "--rounds", "1"),
    "scaling": ("--experts", "8,32", "--layers", "2,4", "--context", "1024,4096", "--sequences", "1,4"),
    "convert": ("--shape", "m0", "--rounds", "1"),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One benchmark's run. form: its JSON, None where it failed; error: why, in its own words."""

    name: str
    arguments: tuple[str, ...]
    code: int
    seconds: float
    form: dict[str, Any] | None
    error: str = ""


def run(
    names: Iterable[str], quick: bool, told: Callable[[str], None], peer: str = "none", python: str | None = None,
    kept: Path | None = None,
) -> list[Part]:  # fmt: skip
    """All named benchmarks; told hears of each before it begins and after it has ended.

    kept: a folder for the JSON of those that ended well, from which a later run of the same arguments takes them.
    """
    beside = () if peer == "none" else ("--peer", peer, *(("--peer-python", python) if python else ()))
    parts = []
    for name in names:
        arguments = QUICK.get(name, ()) if quick else WHOLE.get(name, ()) + (BESIDE.get(name, ()) if beside else ())
        arguments += beside if name in PEERED else ()
        if (part := _kept(kept, name, arguments)) is not None:
            told(f"{' '.join((name, *arguments))}: kept in {kept}")
            parts.append(part)
            continue
        told(f"{' '.join((name, *arguments))} ...")
        part = measure(name, arguments)
        if kept is not None and part.form is not None:
            write(kept / f"{name}.json", json.dumps(asdict(part)).encode())
        told(f"{name}: {part.error or ('noisy' if part.code == NOISY else 'done')}, {part.seconds:.0f} s")
        parts.append(part)
    return parts


def _kept(folder: Path | None, name: str, arguments: tuple[str, ...]) -> Part | None:
    """What an earlier run left of this benchmark, with these arguments. ConfigError for a file that is none of ours."""
    file = None if folder is None else folder / f"{name}.json"
    if file is None or not file.exists():
        return None
    try:
        part = Part(**json.loads(file.read_bytes()))
    except (ValueError, TypeError):
        raise ConfigError(f"{file} is not what --keep leaves: delete it, or name another folder") from None
    return replace(part, arguments=arguments) if tuple(part.arguments) == arguments else None


def measure(name: str, arguments: tuple[str, ...]) -> Part:
    """`colibri-lab bench NAME ... --json` as a child process."""
    command = [sys.executable, "-m", "colibri_lab", "bench", name, *arguments, "--json"]
    begin = time.perf_counter()
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if child.returncode not in (0, NOISY):
        lines = child.stderr.strip().splitlines() or [f"ended with {child.returncode}"]
        return Part(name, arguments, child.returncode, seconds, None, lines[-1])
    return Part(name, arguments, child.returncode, seconds, json.loads(child.stdout.splitlines()[-1]))


def together(parts: Iterable[Part]) -> Result:
    """All rows, each with its benchmark's name before it; what failed is a note."""
    result = Result("all")
    for part in parts:
        if part.form is None:
            result.notes.append(f"{part.name} failed: {part.error}")
            continue
        result.rows += [Row(**{**row, "what": f"{part.name}: {row['what']}"}) for row in part.form["rows"]]
        result.reasons += [f"{part.name}: {reason}" for reason in part.form["reasons"]]
        result.notes.append(f"{part.name} took {part.seconds:.0f} s: {' '.join(part.arguments) or 'as it comes'}")
    return result


def exit_code(parts: Iterable[Part]) -> int:
    """2 where a part failed, else 3 where one was noisy, else 0."""
    codes = [part.code for part in parts]
    return WRONG if any(code not in (0, NOISY) for code in codes) else max(codes, default=0)
