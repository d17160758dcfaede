"""What `engine_mode: async` is worth: the same tokens over the same routes, synchronous and asynchronous in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench.harness import Block, interleave, measured, spread
from colibri_lab.bench.ours import make_model
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.bench.traffic import ImposedRouter
from colibri_lab.engine.engine import Engine
from colibri_lab.events import PageKind

STAGES = ("attention", "router", "dispatch", "experts", "io", "head")
SPREAD = 0.15  # between the quartiles of the rounds' speed-ups
SHORT = 3  # times the rounds where all is in memory: they are short, and the difference looked for is small
DELAY_SHARE = 0.10  # of wall time that threads may wait for a core before waits are not to be trusted


@dataclass(frozen=True)
class Plan:
    """budgets in per cent of all experts; batches of sequences that advance together, `tokens` each in a round."""

    shape: Shape
    budgets: Sequence[int] = (50, 75, 90, 100)
    batches: Sequence[int] = (1, 8)
    tokens: int = 24
    rounds: int = 5
    threads: int = 2
    prefetcher: str = "none"  # of the asynchronous side


@dataclass
class Side:
    """One engine, and what its rounds said and took: seconds a stage."""

    engine: Engine
    said: list[list[int]] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    coverable: float = 0.0  # seconds of waiting that the experts of the same layer could have hidden
    sampled: bool = False  # tokens drawn at random, other ones in each round

    def run(self, prompts: list[list[int]], tokens: int) -> Block:
        cursor = self.engine.telemetry.cursor()
        self.engine.telemetry.read(cursor)
        ids: list[list[int]] = [[] for _ in prompts]
        sampling = {"temperature": 1.0, "seed": len(self.said)} if self.sampled else {}
        with measured(len(prompts) * tokens) as block:
            for i, token in self.engine.generate_batch(prompts, max_tokens=tokens, **sampling):
                ids[i].append(token.id)
        batch = self.engine.telemetry.read(cursor)
        spent = {stage: float(batch.tokens[f"{stage}_ns"].sum()) / 1e9 for stage in STAGES}  # rows share their step
        for stage, seconds in spent.items():
            self.stages[stage] += seconds
        steps = len(np.unique(batch.tokens["t_ns"]))
        self.coverable += coverable(batch.pages, spent["experts"] / (steps * self.engine.spec.layers))
        self.said += ids
        return block


def run(plan: Plan) -> Result:
    """Sync against async for each batch and budget. RuntimeError when they do not say the same."""
    result = Result(f"pipeline {plan.shape.name}")
    path = make_model(plan.shape, 0)
    for batch in plan.batches:
        for share in plan.budgets:
            _compare(result, plan, path, batch, share)
    routed = "its own gates" if plan.shape.branch is not None else "Zipf 1.2 within each of 6 topics"
    result.notes.append(
        f"{plan.threads} threads, prefetcher of async: {plan.prefetcher}; {plan.rounds} rounds in turn "
        f"({SHORT} times as many with all in memory) of {plan.tokens} tokens for each sequence, routed by {routed}; "
        "all sides said the same tokens"
    )
    result.notes.append(
        "speed-up's limit: sync's stages in a row over the longer of its two lanes, the disk's (waiting for pages) and "
        "the processor's (all else, on the same cores)"
    )
    result.notes.append(
        "layer by layer: the limit where no read begins before the router has chosen, so that a layer's experts can "
        "hide that layer's reads alone"
    )
    return result


def coverable(pages: Any, experts: float) -> float:
    """Seconds of the waits among these events (events.PAGES) that `experts` seconds of each layer could hide.

    Reads begin when a layer's experts are known, so each layer hides its own: one that waits long does not make use of
    one that does not wait.
    """
    faults = pages[pages["kind"] == PageKind.FAULT]
    waits = np.unique(faults[["step", "layer", "t_ns", "wait_ns"]])  # experts that were asked for together wait once
    _, where = np.unique(waits[["step", "layer"]], return_inverse=True)
    return float(np.minimum(np.bincount(where, waits["wait_ns"] / 1e9), experts).sum())


def _compare(result: Result, plan: Plan, path: Path, batch: int, share: int) -> None:
    shape, rounds = plan.shape, plan.rounds * (SHORT if share >= 100 else 1)
    routes = None
    if shape.branch is None:
        routes = zipf_markov_routes(shape.layers, shape.experts, shape.top_k, plan.tokens * (rounds + 1), batch)
    prompts = np.random.default_rng(0).integers(3, shape.vocab, (batch, 1)).tolist()
    settings: dict[str, Any] = {
        "threads": plan.threads,
        "max_batch_size": batch,
        "prefill_chunk": batch,
        "kv_cache_max_slots": 1024,
        "pin_after_tokens": None,
    }
    with ExitStack() as stack:

        def side(mode: str, prefetcher: str) -> Side:
            router = {} if routes is None else {"router": ImposedRouter(routes)}
            engine = Engine.load(path, engine_mode=mode, prefetcher=prefetcher, **router, **settings)
            stack.enter_context(engine)
            engine.settings.expert_cache_bytes = engine.describe()["experts_total_bytes"] * share // 100
            fill(engine)
            return Side(engine, sampled=routes is None)

        def turn(one: Side) -> Callable[[], Block]:
            return lambda: one.run(prompts, plan.tokens)

        sides = {"sync": side("sync", "none"), "async": side("async", plan.prefetcher)}
        if plan.prefetcher != "none":
            sides["sync ahead"] = side("sync", plan.prefetcher)
        turns = {mode: turn(one) for mode, one in sides.items()}
        interleave(1, turns)  # the policy learns
        for one in sides.values():
            one.stages, one.coverable = dict.fromkeys(STAGES, 0.0), 0.0
        blocks = interleave(rounds, turns)
        for mode, one in sides.items():
            if one.said != sides["sync"].said:
                raise RuntimeError(f"batch {batch}, {share} %: {mode} said other tokens than sync")
        _report(result, f"batch {batch}, {share} %", blocks, sides)


def fill(engine: Engine) -> None:
    """Read experts until every frame of the budget has been used, so that no run begins with cold frames."""
    pager = engine._parts.pager
    for layer in range(engine.spec.layers):
        for expert in range(engine.spec.experts):
            if pager.resident < pager.frames.capacity:
                pager.acquire(layer, [expert])


def _report(result: Result, name: str, blocks: dict[str, list[Block]], sides: dict[str, Side]) -> None:
    plain, fast = blocks["sync"], blocks["async"]
    work = sum(block.work for block in plain)
    rate = {mode: statistics.median(b.wall_rate for b in blocks[mode]) for mode in blocks}
    for mode in list(blocks)[1:]:
        result.add(f"{name}: {mode}", rate[mode], "tokens/s", peer="sync", peer_value=rate["sync"])
    for mode, one in sides.items():
        for stage, seconds in one.stages.items():
            result.add(f"{name}: {mode} {stage}", 1e3 * seconds / work, "ms/token")
    stages = sides["sync"].stages
    total, disk = sum(stages.values()), stages["io"]
    limit = total / max(disk, total - disk)
    ratios = [b.wall_rate / a.wall_rate for a, b in zip(plain, fast, strict=True)]
    speedup = statistics.median(ratios)
    result.add(f"{name}: speed-up", speedup, "times", limit=limit)
    alone = total / (total - sides["sync"].coverable)
    result.add(f"{name}: speed-up, layer by layer", speedup, "times", limit=alone)
    counted = sides["async"].engine.counters()["dispatch"]
    for what in ("reads_hidden", "reads_arriving", "split_steps"):
        result.add(f"{name}: {what}", counted[what], "")
    foreseen = sides["async"].engine.counters()["pager"]["decode_prefetch_recall"]
    if foreseen:
        result.add(f"{name}: recall", 100 * foreseen, "% of experts asked for")
    delay = statistics.median(b.delay_s / b.wall_s for b in plain + fast)
    if (apart := spread(ratios)) > SPREAD:
        result.reasons.append(f"{name}: the rounds' speed-ups differ by {apart:.0%} between their quartiles")
    if delay > DELAY_SHARE:
        result.reasons.append(f"{name}: threads waited for a core {delay:.0%} of the time")
