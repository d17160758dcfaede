"""From the start of a process to its first token, model files cold: ours and llama.cpp's."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.cold import forget
from colibri_lab.bench.compiled import environment
from colibri_lab.bench.footprint import STARTS
from colibri_lab.bench.harness import Block, interleave, spread
from colibri_lab.bench.peer import LlamaPeer
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.model.spec import ModelSpec
from colibri_lab.model.store import ModelFile

APART = 0.30  # between the quartiles of the rounds
TEXT = "The young lady"  # what the embedded model goes on with
CODE = """
import sys
from colibri_lab.engine.engine import Engine
with Engine.load(sys.argv[1], threads=int(sys.argv[2])) as engine:
    print(next(engine.generate([int(i) for i in sys.argv[3:]], max_tokens=1)).id, flush=True)
"""


@dataclass(frozen=True)
class Plan:
    """shape: None for the embedded model. prompt: tokens of a shape's prompt."""

    shape: Shape | None
    prompt: int = 8
    rounds: int = 5
    threads: int = 2
    seed: int = 0


def run(plan: Plan, peer: str = "none", peer_python: str | None = None) -> Result:
    """Processes in turn. ValueError for a peer that has no such start, or where files cannot be made cold."""
    if peer not in ("none", LlamaPeer.name):
        raise ValueError(f"--peer {peer!r}: load compares with llama.cpp alone")
    name = plan.shape.name if plan.shape else ours.EMBEDDED
    result = Result(f"load {name}")
    path, command = _ours(plan)
    shape = plan.shape or _shape_of(path)
    prompt = np.random.default_rng(plan.seed).integers(3, shape.vocab, plan.prompt).tolist()
    if plan.shape is not None:
        command += [str(plan.threads), *map(str, prompt)]
    sides: dict[str, Callable[[], Block]] = {
        "ours": lambda: _first_output(command, path),
        "NumPy": lambda: _first_output([sys.executable, "-c", "import numpy\nprint(1)"]),
        "imports": lambda: _first_output([sys.executable, "-c", f"{STARTS['all imports of generate']}\nprint(1)"]),
    }
    if peer != "none":
        with LlamaPeer(peer_python) as llama:
            file = llama.file(shape, plan.seed, ours.folder())
        for repack in (True, False):
            how = "" if repack else ", no repack"
            sides[f"{peer}{how}"] = lambda repack=repack: _peers(plan, shape, prompt, file, peer_python, repack)  # type: ignore[misc]
    interleave(1, sides)  # programs are in the page cache and compiled, models are not
    blocks = interleave(plan.rounds, sides)
    seconds = {side: statistics.median(b.wall_s for b in found) for side, found in blocks.items()}
    for side in sides:
        if side.startswith(LlamaPeer.name):
            result.add("start to first token", seconds["ours"], "s", peer=side, peer_value=seconds[side],
                       smaller_is_better=True)  # fmt: skip
    if peer == "none":
        result.add("start to first token", seconds["ours"], "s")
    result.add("of it: interpreter and NumPy", seconds["NumPy"], "s")
    result.add("of it: interpreter and all imports", seconds["imports"], "s")
    for side, found in blocks.items():
        if (apart := spread([b.wall_s for b in found])) > APART:
            result.reasons.append(f"{side}: the rounds differ by {apart:.0%} between their quartiles")
    said = f"{plan.prompt} tokens" if plan.shape else repr(TEXT)
    result.notes.append(
        f"{said} given, {plan.threads} threads; model files dropped from the page cache before each start, programs "
        f"not, and their modules are compiled; {plan.rounds} rounds in turn"
    )
    if plan.shape is None and peer != "none":
        result.notes.append(f"{peer}: random weights of the same shape, {plan.prompt} tokens given")
    return result


def _ours(plan: Plan) -> tuple[Path, list[str]]:
    """(the file that is read, the command that starts)."""
    if plan.shape is not None:
        path = ours.make_model(plan.shape, plan.seed)
        return path, [sys.executable, "-c", CODE, str(path)]
    with ours.load(None, plan.seed, plan.threads, max_batch_size=1) as engine:
        path = Path(engine.describe()["path"])
    command = [sys.executable, "-m", "colibri_lab", "generate", "--prompt", TEXT, "--max-tokens", "1"]
    return path, [*command, "--set", f"threads={plan.threads}"]


def _shape_of(path: Path) -> Shape:
    """A shape with the embedded model's sizes, for random weights."""
    with ModelFile.open(path) as file:
        s: ModelSpec = file.spec
    return Shape(ours.EMBEDDED, s.hidden_size, s.layers, s.experts, s.top_k, s.expert_ffn, s.heads, s.kv_heads,
                 s.head_dim, vocab=s.vocab_size, positions=s.max_positions)  # fmt: skip


def _first_output(command: list[str], cold: Path | None = None) -> Block:
    """Wall time from a process's start to the first byte that it prints. RuntimeError when it prints none."""
    if cold is not None:
        forget(cold)
    begin = perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment()) as child:
            assert child.stdout is not None
            first = child.stdout.read(1)
            took = perf_counter() - begin
            child.stdout.read()
        if not first or child.returncode:
            errors.seek(0)
            raise RuntimeError(f"a process that starts failed: {errors.read().strip()[-300:]}")
    return Block(1, took)


def _peers(plan: Plan, shape: Shape, prompt: list[int], file: Path, python: str | None, repack: bool) -> Block:
    forget(file)
    begin = perf_counter()
    with LlamaPeer(python, repack) as llama:
        llama.load(shape, plan.seed, ours.folder(), plan.threads)
        llama.decode(prompt, [])
        return Block(1, perf_counter() - begin)
