"""What KV persistence does to memory, to speed, and to a restart: engines in processes of their own, side by side.

A long context is reached by drawn keys and values through the real tables (see persist_child.Drawn), since attention
over 64 K tokens is quadratic; the last tokens of the prompt and all that is decoded are computed in earnest.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_lab.bench import ours
from colibri_lab.bench.harness import spread
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import SHAPES

MB = 1e6
CLAIM = 1 - 11.2 / 18.3
NOISE = 0.25  # between the quartiles of the rounds' ratios
SHORT = 1024  # tokens of the prompt that is computed in earnest


@dataclass(frozen=True)
class Plan:
    """tokens: of the long context, its decoded ones included. computed: of its prompt, at the end, in earnest.

    experts: share of the experts that has room in memory. decode: tokens of a round.
    """

    shape: str
    tokens: int
    computed: int
    rounds: int
    decode: int
    experts: float
    threads: int
    dtype: str
    seed: int

    @property
    def prompt(self) -> int:
        return self.tokens - self.rounds * self.decode - 1


class Process:
    """A persist_child; every attribute is one of its orders."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._child = subprocess.Popen([sys.executable, "-m", "colibri_lab.bench.persist_child"], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)  # fmt: skip

    def __getattr__(self, op: str) -> Any:
        def ask(**order: Any) -> dict[str, Any]:
            assert self._child.stdin and self._child.stdout
            self._child.stdin.write(json.dumps({"op": op, **order}) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
            if not line:
                self._errors.seek(0)
                raise ValueError(f"a measured process ended: {self._errors.read().strip().splitlines()[-1:]}")
            answer: dict[str, Any] = json.loads(line)
            return answer

        return ask

    def stop(self) -> None:
        """End it; killed, if it still computes."""
        self._child.kill()
        self._child.communicate()
        self._errors.close()


@contextmanager
def running(plan: Plan, folder: Path | None) -> Iterator[Any]:
    process = Process()
    try:
        where = None if folder is None else str(folder)
        process.load(shape=plan.shape, positions=plan.tokens + 8, threads=plan.threads, seed=plan.seed,
                     experts=plan.experts, dtype=plan.dtype, folder=where)  # fmt: skip
        yield process
        process.close()
    finally:
        process.stop()


def run(plan: Plan) -> Result:
    """Memory and speed with persistence and without, in turn; then a new process that finds what was stored."""
    if plan.shape not in SHAPES:
        raise ValueError(f"--shape {plan.shape!r} is none of {', '.join(SHAPES)}")
    least = SHORT + plan.rounds * plan.decode + 1
    if plan.prompt < max(plan.computed, 1) or plan.tokens < least:
        raise ValueError(f"--tokens {plan.tokens} must be at least {max(least, plan.computed + least - SHORT)}")
    result = Result(f"persist {plan.shape}")
    ours.make_model(SHAPES[plan.shape], plan.seed)
    folder = Path(tempfile.mkdtemp(prefix="prefixes-", dir=ours.folder()))
    try:
        with ExitStack() as stack:
            off, on = (stack.enter_context(running(plan, place)) for place in (None, folder))
            first = _short(plan, off, on, result)
            _long(plan, off, on, result)
            _memory(plan, off.look(), on.look(), result)
            on.end()
        _restart(plan, folder, first, result)
    finally:
        shutil.rmtree(folder)
    result.notes.append(f"{plan.experts:.0%} of the experts in memory, KV {plan.dtype}, {plan.threads} threads")
    result.notes.append(f"of the long prompt the last {plan.computed} tokens are computed, those before are drawn")
    result.notes.append(f"the claim is 18.3 GB to 11.2 GB, {CLAIM:.0%} less")
    return result


def _short(plan: Plan, off: Any, on: Any, result: Result) -> float:
    """Prompts and tokens that are all computed, sides in turn; the seconds of a prompt without persistence."""
    prompts: list[tuple[float, float]] = []
    tokens: list[tuple[float, float]] = []
    for i in range(plan.rounds):
        sides = (off, on) if i % 2 else (on, off)  # what drifts falls on both
        begun = {side: side.begin(tokens=SHORT, computed=SHORT, seed=plan.seed + i)["seconds"] for side in sides}
        times = {side: side.decode(tokens=4 * plan.decode)["seconds"] for side in sides}
        prompts.append((begun[off], begun[on]))
        tokens.append((times[off], times[on]))
    _rates(f"prompt of {SHORT} tokens", SHORT, prompts, result)
    _rates(f"decode after {SHORT} tokens", 4 * plan.decode, tokens, result)
    return statistics.median(without for without, _ in prompts)


def _long(plan: Plan, off: Any, on: Any, result: Result) -> None:
    for side in (off, on):
        side.begin(tokens=plan.prompt, computed=plan.computed, seed=plan.seed + SHORT)
        side.settle()  # the disk is busy for a second or two; its time is told apart
    times = [(off.decode(tokens=plan.decode)["seconds"], on.decode(tokens=plan.decode)["seconds"])
             for _ in range(plan.rounds)]  # fmt: skip
    _rates(f"decode after {plan.prompt} tokens", plan.decode, times, result)


def _rates(what: str, tokens: int, times: list[tuple[float, float]], result: Result) -> None:
    """A row of medians; times: seconds (without, with) of each round."""
    without, with_ = (statistics.median(side) for side in zip(*times, strict=True))
    result.add(what, tokens / with_, "tokens/s", peer="off", peer_value=tokens / without)
    if (apart := spread([without / with_ for without, with_ in times])) > NOISE:
        result.reasons.append(f"{what}: the rounds' ratios differ by {apart:.0%} between their quartiles")


def _memory(plan: Plan, off: dict[str, Any], on: dict[str, Any], result: Result) -> None:
    """Peaks beside each other, and what they are made of."""

    def row(what: str, with_: float, without: float) -> None:
        result.add(what, with_ / MB, "MB", peer="off", peer_value=without / MB, smaller_is_better=True)

    shape, width = SHAPES[plan.shape], 2 if plan.dtype == "fp16" else 4
    token, spilled = shape.kv_heads * shape.head_dim * 2 * width, on["persistence"]["slots_spilled"]
    peaks = [side["peak"]["RssAnon"] for side in (on, off)]
    kv = [(on["kv"]["tokens"] - spilled * on["kv"]["slot_size"]) * token, off["kv"]["tokens"] * token]
    experts = [side["pager"]["experts_resident"] * side["expert_bytes"] for side in (on, off)]
    rest = [peak - a - b - on["resident_bytes"] for peak, a, b in zip(peaks, kv, experts, strict=True)]
    row(f"peak of anonymous memory, {plan.tokens} tokens", *peaks)
    result.add("less anonymous memory", (1 - peaks[0] / peaks[1]) * 100, "%")
    row("of it: keys and values", *kv)
    row("of it: experts", *experts)
    row("of it: other weights", on["resident_bytes"], on["resident_bytes"])
    row("of it: the rest", *rest)
    for name, side in (("on", on), ("off", off)):
        result.add(f"peak of file-backed memory, {name}", side["peak"]["RssFile"] / MB, "MB")
    result.add("slots in the file", spilled, "slots", limit=on["kv"]["slots_used"])
    p = on["persistence"]
    result.add("written", p["bytes_written"] / MB, "MB")
    result.add("syncing, in a thread of its own", p["sync_s"], "s")
    result.add("writing, in the engine's thread", p["bytes_written"] / MB / max(p["write_s"], 1e-9), "MB/s")


def _restart(plan: Plan, folder: Path, computed_s: float, result: Result) -> None:
    """A new process on the same folder."""
    with running(plan, folder) as process:
        first = process.begin(tokens=SHORT, computed=SHORT, seed=plan.seed)["seconds"]
        process.end()
        result.add(f"first token after a restart, {SHORT} tokens", first * 1e3, "ms", peer="computed",
                   peer_value=computed_s * 1e3, smaller_is_better=True)  # fmt: skip
        again = process.begin(tokens=plan.prompt, computed=plan.computed, seed=plan.seed + SHORT)["seconds"]
        seen = process.look()
        result.add("tokens restored", seen["persistence"]["tokens_restored"], "tokens", limit=SHORT + plan.prompt - 2)
        result.add("prompt tokens computed", seen["engine"]["prefill_tokens"], "tokens", peer="without",
                   peer_value=SHORT + plan.prompt, smaller_is_better=True)  # fmt: skip
        result.add(f"first token after a restart, {plan.prompt} tokens", again * 1e3, "ms")
