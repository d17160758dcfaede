"""Is `colibri-lab plan` right? The same model, memory, disk and budget: predicted, and measured beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench.harness import Block
from colibri_lab.bench.ours import make_model, spec_of
from colibri_lab.bench.paging import disk_delay
from colibri_lab.bench.pipeline import Side, fill
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import GROUP, Shape
from colibri_lab.bench.traffic import ImposedRouter
from colibri_lab.engine.engine import Engine
from colibri_lab.model.plan import make_plan
from colibri_lab.ops.probe import read_bandwidth
from colibri_lab.planning.boards import Machine
from colibri_lab.planning.cost import Forecast, forecast, needs
from colibri_lab.planning.misses import ASSUMED, assumed, hit_rate

DELAY_SHARE = 0.10  # of wall time that threads may wait for a core before speeds are not to be trusted
PROBES = 9  # of the memory's rate
WARM = 2  # rounds in which the policy learns


@dataclass(frozen=True)
class Plan:
    """budgets in per cent of all experts; `tokens` decoded in a round."""

    shape: Shape
    budgets: Sequence[int] = (25, 50, 75, 100)
    tokens: int = 48
    rounds: int = 5
    threads: int = 1


def run(plan: Plan) -> Result:
    """Rates of memory and disk, then an engine, for each budget. ValueError for a wrong one."""
    if wrong := [share for share in plan.budgets if not 2 <= share <= 100]:
        raise ValueError(f"--budgets {wrong[0]}: per cent of all experts, 2 to 100")
    result = Result(f"plan {plan.shape.name}")
    path = make_model(plan.shape, 0)
    for share in plan.budgets:
        _compare(result, plan, path, _rates(result, plan, path, share), share)
    result.notes.append(
        f"int4, {plan.threads} thread, engine_mode sync, one sequence; predicted and measured routes differ by their "
        f"seed alone ({ASSUMED}); ratio: measured over predicted"
    )
    return result


def _rates(result: Result, plan: Plan, path: Path, share: int) -> Machine:
    """What the machine gives just now, others' work included: medians, and experts read one at a time."""
    dram = statistics.median(read_bandwidth(plan.threads, passes=1, by_cpu=False) for _ in range(PROBES))
    disk = make_plan(spec_of(plan.shape), "int4", GROUP).expert_bytes / disk_delay(path)[1]
    result.add(f"{share} % in memory: memory's rate", dram, "GB/s")
    result.add(f"{share} % in memory: disk's rate", disk / 1e9, "GB/s")
    return Machine("here", 0, 1e9 * dram, disk, latency=0)


def predicted(shape: Shape, machine: Machine, share: float, context: int) -> Forecast:
    """What `colibri-lab plan` says of a shape with `share` (0 to 1) of the experts in memory."""
    layout = make_plan(spec_of(shape), "int4", GROUP)
    hits = hit_rate(assumed(shape.layers, shape.experts, shape.top_k), share)
    return forecast(needs(layout, context), machine, share, hits)


def _compare(result: Result, plan: Plan, path: Path, machine: Machine, share: int) -> None:
    shape, rounds = plan.shape, plan.rounds + WARM
    said = predicted(shape, machine, share / 100, plan.tokens // 2)
    routes = zipf_markov_routes(shape.layers, shape.experts, shape.top_k, plan.tokens * rounds)
    settings = {"threads": plan.threads, "max_batch_size": 1, "kv_cache_max_slots": 512, "pin_after_tokens": None}
    prompt = np.random.default_rng(0).integers(3, shape.vocab, (1, 1)).tolist()
    with Engine.load(path, router=ImposedRouter(routes), **settings) as engine:
        engine.settings.expert_cache_bytes = engine.describe()["experts_total_bytes"] * share // 100
        fill(engine)
        side = Side(engine)
        for _ in range(WARM):
            side.run(prompt, plan.tokens)
        before = engine.counters()["pager"]
        blocks: list[Block] = [side.run(prompt, plan.tokens) for _ in range(plan.rounds)]
        after = engine.counters()["pager"]
    hits, faults = (after[name] - before[name] for name in ("hits", "faults"))
    name, work = f"{share} % in memory", sum(block.work for block in blocks)
    _beside(result, f"{name}: hit rate", 100 * hits / (hits + faults), "% hits", 100 * said.hits)
    waited = 1e3 * (after["io_wait_s"] - before["io_wait_s"]) / work
    if said.seconds["disk"]:
        _beside(result, f"{name}: wait for pages", waited, "ms/token", 1e3 * said.seconds["disk"])
    speed = statistics.median(b.wall_rate for b in blocks)
    _beside(result, f"{name}: speed", speed, "tokens/s", said.tokens_per_s)
    result.notes.append(f"{name}: predicted to be bound by {said.bound}")
    delay = statistics.median(b.delay_s / b.wall_s for b in blocks)
    if delay > DELAY_SHARE:
        result.reasons.append(f"{name}: threads waited for a core {delay:.0%} of the time")


def _beside(result: Result, what: str, measured: float, unit: str, said: float) -> None:
    result.add(what, measured, unit, peer="predicted", peer_value=said)
