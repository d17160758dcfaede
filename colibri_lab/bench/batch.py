"""What a batch is worth: tokens a second against how many requests advance together, with latency and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, measured, percentile, spread
from colibri_lab.bench.peer import LlamaPeer
from colibri_lab.bench.quality import documents
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.ops.layout import PAGE

MIB = 1 << 20
SLOT = 16  # tokens of a KV slot: many short sequences share the pool
CHUNK = 64  # prompt tokens of a step
DELAY_SHARE = 0.10  # of wall time that threads may wait for a core before speeds are not to be trusted
RATE_SPREAD = 0.20  # between the quartiles of the rounds
RATIO_SPREAD = 0.10  # and of their ratios to the peer's


@dataclass(frozen=True)
class Plan:
    """tokens: written by each request while all of a batch are running; prompt: tokens given to each."""

    batches: Sequence[int] = (1, 4, 8, 16, 32)
    tokens: int = 32
    prompt: int = 32
    rounds: int = 3
    threads: int = 1
    engine_mode: str = "sync"


@dataclass
class Side:
    """Figures of one batch size over all rounds; memory in bytes, of its first round."""

    latency_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    ids: list[list[int]] = field(default_factory=list)  # of the last round, by request, while all of them wrote


def run(text: Path, plan: Plan, shape: Shape | None = None, peer: str = "none", python: str | None = None) -> Result:
    """Batches in turn on one engine that holds all experts. shape: None for the embedded model, which goes on with
    pieces of the texts in `text`. ValueError for a folder without enough text, and for wrong numbers."""
    if peer not in ("none", LlamaPeer.name):
        raise ValueError(f"--peer {peer!r}: batch compares with llama.cpp alone")
    if peer != "none" and shape is None:
        raise ValueError("--peer takes random weights, the same for both: name a --shape")
    if not plan.batches or min(plan.batches) < 1 or max(plan.batches) > 256:
        raise ValueError(f"--batches {','.join(map(str, plan.batches))}: numbers from 1 to 256")
    result = Result(f"batch {shape.name if shape else ours.EMBEDDED}")
    sizes = sorted(set(plan.batches))
    longest = plan.prompt + plan.tokens + _ahead(plan, max(sizes)) + 1
    if shape is not None and longest > shape.positions:
        raise ValueError(f"--prompt and --tokens: {longest} positions, shape {shape.name} has {shape.positions}")
    with ExitStack() as stack:
        llama = None if peer == "none" else stack.enter_context(LlamaPeer(python))  # first: a missing one costs no time
        if llama is not None and shape is not None:
            llama.file(shape, 0, ours.folder())
            llama.load(replace(shape, positions=longest), 0, ours.folder(), plan.threads, max(sizes))
            result.notes.append(f"{llama.name}: {llama.settings}, the same prompts and tokens")
        _run(text, plan, shape, sizes, llama, result)
    return result


def _run(text: Path, plan: Plan, shape: Shape | None, sizes: list[int], llama: LlamaPeer | None,
         result: Result) -> None:  # fmt: skip
    engine = ours.load(
        shape, 0, plan.threads, max_batch_size=max(sizes), engine_mode=plan.engine_mode, prefill_chunk=CHUNK,
        kv_cache_slot_size=SLOT, kv_cache_max_slots=1 << 16,
    )  # fmt: skip
    with engine:
        prompts = _prompts(engine, plan, max(sizes), shape, text)
        sides = {size: Side() for size in sizes}
        work: dict[str, Callable[[], Block]] = {}
        for size in sizes:
            work[str(size)] = partial(together, engine, plan, prompts[:size], sides[size])
            if llama is not None:
                work[f"{size} of {llama.name}"] = partial(_theirs, llama, prompts[:size], sides[size])
        blocks = interleave(plan.rounds, work)
    for size in sizes:
        if llama is not None:
            _beside(result, plan, size, blocks[str(size)], blocks[f"{size} of {llama.name}"], llama)
        _report(result, size, sides[size], blocks[str(size)], blocks[str(sizes[0])] if size != sizes[0] else None,
                sizes[0])  # fmt: skip
    result.notes.append(
        f"{plan.threads} thread, {plan.engine_mode}; {plan.prompt} tokens given to each request; figures of the steps "
        f"in which all requests of a batch write, {plan.tokens} tokens each or more; memory: peak so far in the first "
        f"round, batches rising"
    )


def _ahead(plan: Plan, size: int) -> int:
    """Tokens that the first request may write before the last one's prompt is read."""
    return -(-size * plan.prompt // CHUNK) + 1


def _prompts(engine: Engine, plan: Plan, count: int, shape: Shape | None, text: Path) -> list[list[int]]:
    if shape is not None:
        drawn: list[list[int]] = np.random.default_rng(0).integers(3, shape.vocab, (count, plan.prompt)).tolist()
        return drawn
    ids = [id for path in sorted(text.glob("*.txt")) for d in documents(path) for id in engine.tokenizer.encode(d)]
    step = max(plan.prompt, len(ids) // count)
    pieces = [ids[i : i + plan.prompt] for i in range(0, len(ids) - plan.prompt, step)][:count]
    if len(pieces) < count:
        raise ValueError(f"{text} has not {count * plan.prompt} tokens of .txt files; a checkout has data/validation")
    return pieces


def together(engine: Engine, plan: Plan, prompts: list[list[int]], side: Side) -> Block:
    """One batch from its prompts to the first request's end; the block covers the steps in which all write."""
    side.ids = [[] for _ in prompts]
    stream = engine.generate_batch(prompts, max_tokens=plan.tokens + _ahead(plan, len(prompts)))
    waiting = set(range(len(prompts)))
    while waiting:
        i, token = next(stream)
        side.ids[i] = [token.id]  # the last before all write
        if i in waiting:
            waiting.remove(i)
            side.first_ms.append(token.latency_ms)
    with measured(0) as block:
        for i, token in stream:
            block.work += 1
            side.ids[i].append(token.id)
            side.latency_ms.append(token.latency_ms)
            if token.finish_reason:
                break
    if not side.memory:
        side.memory = memory(engine)
    stream.close()  # type: ignore[attr-defined]
    return block


def _theirs(llama: LlamaPeer, prompts: list[list[int]], side: Side) -> Block:
    """The tokens that ours had while all wrote, at the same batch."""
    steps = [list(step) for step in zip(*side.ids, strict=False)]
    return llama.together(prompts, steps)


def _beside(result: Result, plan: Plan, size: int, mine: list[Block], theirs: list[Block], llama: LlamaPeer) -> None:
    one = plan.threads == 1  # with more threads CPU time counts waiting too
    clock = "CPU time" if one else "wall time"
    rates = [[b.cpu_rate if one else b.wall_rate for b in side] for side in (mine, theirs)]
    result.add(f"batch {size}: decode, {clock}", statistics.median(rates[0]), "tokens/s", peer=llama.name,
               peer_value=statistics.median(rates[1]))  # fmt: skip
    apart = spread([a / b for a, b in zip(*rates, strict=True)])
    if apart > RATIO_SPREAD:
        result.reasons.append(f"batch {size}: the rounds' ratios differ by {apart:.0%} between their quartiles")


def memory(engine: Engine) -> dict[str, int]:
    """Bytes: anonymous memory of the process (Linux) and expert frames, now; KV slots, the most so far."""
    about, counters = engine.describe(), engine.counters()
    slot = about["kv_slot_size"] * about["kv_bytes_per_token"] // about["layers"]
    found = {
        "experts": int(counters["pager"]["frames_used"]) * PAGE,
        "KV slots": int(counters["kv"]["slots_peak"]) * slot,
    }
    held = anonymous()
    return found if held is None else {"anonymous memory": held} | found


def anonymous() -> int | None:
    """Bytes of this process's anonymous memory now; None where the system does not tell."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return None


def _report(result: Result, size: int, side: Side, blocks: list[Block], least: list[Block] | None, first: int) -> None:
    name = f"batch {size}"
    speed = statistics.median(b.wall_rate for b in blocks)
    if least is None:
        result.add(f"{name}: speed", speed, "tokens/s")
    else:
        result.add(f"{name}: speed", speed, "tokens/s", peer=f"batch {first}",
                   peer_value=statistics.median(b.wall_rate for b in least))  # fmt: skip
    for share in (50, 95, 99):
        result.add(f"{name}: latency p{share}", percentile(side.latency_ms, share / 100), "ms/token")
    for share in (50, 95):
        result.add(f"{name}: first token p{share}", percentile(side.first_ms, share / 100), "ms")
    for what, size_in_bytes in side.memory.items():
        result.add(f"{name}: {what}", size_in_bytes / MIB, "MiB")
    delay = statistics.median(b.delay_s / b.wall_s for b in blocks)
    if delay > DELAY_SHARE:
        result.reasons.append(f"{name}: threads waited for a core {delay:.0%} of the time")
    if (wide := spread([b.wall_rate for b in blocks])) > RATE_SPREAD:
        result.reasons.append(f"{name}: the rounds' speeds are {wide:.0%} apart")
