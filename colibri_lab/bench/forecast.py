"""Is `colibri-lab plan` right? The same model, memory, disk and budget: predicted, and measured beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench.disk import DEPTH, Disk
from colibri_lab.bench.harness import Block
from colibri_lab.bench.ours import make_model, spec_of
from colibri_lab.bench.pipeline import Side
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import GROUP, Shape
from colibri_lab.bench.traffic import ImposedRouter
from colibri_lab.engine.engine import Engine
from colibri_lab.model.plan import Plan as Layout
from colibri_lab.model.plan import make_plan
from colibri_lab.ops.probe import read_bandwidth
from colibri_lab.planning.boards import Machine
from colibri_lab.planning.cost import Forecast, forecast, needs
from colibri_lab.planning.misses import ASSUMED, assumed, hit_rate

DELAY_SHARE = 0.10  # of wall time that threads may wait for a core before speeds are not to be trusted
PROBES = 3  # of the memory's rate, beside each round
DISK_S = 0.15  # seconds of reading beside each round
WARM = 2  # rounds in which the policy learns
BAR = 0.2  # of the prediction


@dataclass(frozen=True)
class Plan:
    """budgets in per cent of all experts; `tokens` decoded in a round."""

    shape: Shape
    budgets: Sequence[int] = (25, 50, 75, 100)
    tokens: int = 64
    rounds: int = 6
    threads: int = 1


def run(plan: Plan) -> Result:
    """An engine for each budget, the rates of memory and disk between its rounds. ValueError for a wrong budget."""
    if wrong := [share for share in plan.budgets if not 2 <= share <= 100]:
        raise ValueError(f"--budgets {wrong[0]}: per cent of all experts, 2 to 100")
    result = Result(f"plan {plan.shape.name}")
    path = make_model(plan.shape, 0)
    ratios = [_compare(result, plan, path, share) for share in plan.budgets]
    result.add("furthest from the prediction", 100 * max(abs(ratio - 1) for ratio in ratios), "% of it",
               limit=100 * BAR, smaller_is_better=True)  # fmt: skip
    result.notes.append(
        f"int4, {plan.threads} thread, engine_mode sync, one sequence; predicted and measured routes differ by their "
        f"seed alone ({ASSUMED}); ratio: measured over predicted; rates are measured between the rounds"
    )
    return result


@dataclass
class Rates:
    """What the machine gives just now, others' work included, by probes between the rounds of an engine."""

    threads: int
    together: int  # experts that are read at a time
    disk: Disk
    dram: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    def probe(self) -> None:
        self.dram += [read_bandwidth(self.threads, passes=2, by_cpu=False) for _ in range(PROBES)]
        self.reads.append(self.disk.rate(self.together, DISK_S))

    @property
    def machine(self) -> Machine:
        """Medians. The rate of single reads has their latency in it."""
        return Machine("here", 0, 1e9 * statistics.median(self.dram), statistics.median(self.reads), latency=0)


def layout_of(shape: Shape) -> Layout:
    return make_plan(spec_of(shape), "int4", GROUP)


def predicted(shape: Shape, machine: Machine, share: float, context: int) -> Forecast:
    """What `colibri-lab plan` says of a shape with `share` (0 to 1) of the experts in memory."""
    hits = hit_rate(assumed(shape.layers, shape.experts, shape.top_k), share)
    return forecast(needs(layout_of(shape), context), machine, share, hits)


def _compare(result: Result, plan: Plan, path: Path, share: int) -> float:
    """Rows of one budget; measured speed over predicted."""
    shape, rounds = plan.shape, plan.rounds + WARM
    routes = zipf_markov_routes(shape.layers, shape.experts, shape.top_k, plan.tokens * rounds)
    settings = {"threads": plan.threads, "max_batch_size": 1, "kv_cache_max_slots": 512, "pin_after_tokens": None}
    prompt = np.random.default_rng(0).integers(3, shape.vocab, (1, 1)).tolist()
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.load(path, router=ImposedRouter(routes), **settings))
        engine.settings.expert_cache_bytes = engine.describe()["experts_total_bytes"] * share // 100
        rates = Rates(plan.threads, _together(shape, share / 100), stack.enter_context(closing(Disk(path))))
        rates.disk.warm()
        _read_all(engine)
        side, blocks = Side(engine), []
        for _ in range(WARM):
            side.run(prompt, plan.tokens)
        before = engine.counters()["pager"]
        for _ in range(plan.rounds):
            rates.probe()
            blocks.append(side.run(prompt, plan.tokens))
        after = engine.counters()["pager"]
    said = predicted(shape, rates.machine, share / 100, plan.tokens // 2)
    return _report(result, f"{share} % in memory", said, rates, blocks, {k: after[k] - before[k] for k in COUNTED})


COUNTED = ("hits", "faults", "io_wait_s")


def _read_all(engine: Engine) -> None:
    """Every expert once: frames are there and pages are checked before anything is measured."""
    for layer in range(engine.spec.layers):
        for expert in range(engine.spec.experts):
            engine._parts.pager.acquire(layer, [expert])


def _together(shape: Shape, share: float) -> int:
    """Experts that a layer lacks where it lacks some, on average: so many are read at a time."""
    hits = hit_rate(assumed(shape.layers, shape.experts, shape.top_k), share)
    return min(DEPTH, max(1, round(shape.top_k * (1 - hits) / (1 - hits**shape.top_k)))) if hits < 1 else 1


def _report(result: Result, name: str, said: Forecast, rates: Rates, blocks: list[Block],
            counted: dict[str, float]) -> float:  # fmt: skip
    work, machine = sum(block.work for block in blocks), rates.machine
    result.add(f"{name}: memory's rate", machine.dram / 1e9, "GB/s")
    hits = 100 * counted["hits"] / (counted["hits"] + counted["faults"])
    _beside(result, f"{name}: hit rate", hits, "% hits", 100 * said.hits)
    if said.seconds["disk"]:
        result.add(f"{name}: disk's rate, {rates.together} at a time", machine.disk / 1e9, "GB/s")
        waited = 1e3 * counted["io_wait_s"] / work
        _beside(result, f"{name}: wait for pages", waited, "ms/token", 1e3 * said.seconds["disk"])
    speed = statistics.median(b.wall_rate for b in blocks)
    _beside(result, f"{name}: speed", speed, "tokens/s", said.tokens_per_s)
    result.notes.append(f"{name}: predicted to be bound by {said.bound}")
    delay = statistics.median(b.delay_s / b.wall_s for b in blocks)
    if delay > DELAY_SHARE:
        result.reasons.append(f"{name}: threads waited for a core {delay:.0%} of the time")
    return speed / said.tokens_per_s


def _beside(result: Result, what: str, measured: float, unit: str, said: float) -> None:
    result.add(what, measured, unit, peer="predicted", peer_value=said)
