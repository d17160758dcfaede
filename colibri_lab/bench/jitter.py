"""How steady a token's latency is, with and without disk priority and cores of its own, alone and beside a neighbour
process that keeps the disk busy. The budget is below the model, so that tokens wait for the disk."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri_lab.bench import ours
from colibri_lab.bench.harness import percentile, spread
from colibri_lab.bench.neighbour import Hungry, neighbour
from colibri_lab.bench.quality import documents
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.bench.traffic import Traffic, texts, zipf_markov
from colibri_lab.engine.engine import Engine
from colibri_lab.engine.host import Host, cores_of
from colibri_lab.engine.probe import cores
from colibri_lab.errors import ConfigError

WARM = 0.25  # of a run's tokens: the cache fills
SHARES = (50, 95, 99)
DELAY_SHARE = 0.25  # of wall time that threads may wait for a core alone: our own readers wait for each other a little
MEDIAN_SPREAD = 0.20  # between the quartiles of the rounds' medians, alone and without settings
ALONE, BESIDE = "alone", "neighbour"


@dataclass(frozen=True)
class Plan:
    """budget: per cent of all experts. priority, mask: the settings that are compared with none."""

    budget: int = 50
    tokens: int = 96
    rounds: int = 4  # as many as there are settings: each has been in each place then
    threads: int = 1
    priority: str = "high"
    mask: int | None = None  # None: the last core that the process may use
    engine_mode: str = "sync"


@dataclass
class Side:
    """Milliseconds of every token after the warm-up, by round."""

    rounds: list[list[float]] = field(default_factory=list)
    delay: list[float] = field(default_factory=list)  # share of wall time that threads waited for a core
    waits_ms: list[float] = field(default_factory=list)  # for pages, a token

    @property
    def all(self) -> list[float]:
        return [latency for one in self.rounds for latency in one]

    def tail(self) -> list[float]:
        """P99 of each round."""
        return [percentile(one, 0.99) for one in self.rounds]


def run(text: Path, plan: Plan, shape: Shape | None = None) -> Result:
    """All settings in turn, round by round, alone and then beside the neighbour. shape: None for the embedded model.

    ValueError for a folder without texts and for wrong settings.
    """
    result = Result(f"jitter {shape.name if shape else ours.EMBEDDED}")
    traffic = _traffic(text, plan, shape)
    settings = _settings(plan, result)
    places = [(where, name) for where in (ALONE, BESIDE) for name in settings]
    sides = {place: Side() for place in places}
    said: list[list[int]] | None = None
    rates: list[float] = []
    folder = ours.folder()
    folder.mkdir(parents=True, exist_ok=True)
    order = list(settings)
    for _ in range(plan.rounds):
        for where in (ALONE, BESIDE):
            with _nobody() if where == ALONE else neighbour(folder) as hungry:
                for name in order:
                    written = _one(traffic, plan, settings[name], sides[where, name])
                    if said is not None and written != said:
                        raise RuntimeError(f"{name}, {where}: other tokens than before")
                    said = written
            if where == BESIDE:
                rates.append(hungry.rate)
        order = order[1:] + order[:1]  # a disk may slow down or speed up while a neighbour is there
    _report(result, sides, list(settings))
    _verdict(result, sides, list(settings))
    about = Host().describe(traffic.model)
    result.notes.append(
        f"{plan.budget} % of the experts in memory, {plan.threads} thread, {plan.engine_mode}; the neighbour moved "
        f"{statistics.median(rates) / 1e6:.0f} MB/s; every run said the same tokens"
    )
    result.notes.append(f"I/O scheduler {about['io_priority_effect']}")
    wide = spread([percentile(one, 0.5) for one in sides[ALONE, "none"].rounds])
    if wide > MEDIAN_SPREAD:
        result.reasons.append(f"alone, the rounds' medians are {wide:.0%} apart")
    delay = statistics.median(sides[ALONE, "none"].delay)
    if delay > DELAY_SHARE:
        result.reasons.append(f"alone, threads waited for a core {delay:.0%} of the time: somebody else is busy here")
    return result


@contextmanager
def _nobody() -> Iterator[Hungry]:
    yield Hungry()


def _traffic(text: Path, plan: Plan, shape: Shape | None) -> Traffic:
    if shape is not None:
        return zipf_markov(ours.make_model(shape, 0), shape, plan.tokens, plan.threads)
    beginnings = [documents(path)[0] for path in sorted(text.glob("*.txt"))]
    if not beginnings:
        raise ValueError(f"{text} holds no .txt files; a checkout has them in data/validation")
    return texts(beginnings, plan.tokens, plan.threads)


def _settings(plan: Plan, result: Result) -> dict[str, dict[str, Any]]:
    """What is compared, by name; what the system refuses is said and left out."""
    mask = plan.mask or 1 << max(cores())
    priority: dict[str, Any] = {"io_priority": plan.priority}
    affinity: dict[str, Any] = {"cpu_affinity_mask": mask}
    wanted = {f"io_priority {plan.priority}": priority, f"cores {_listed(mask)}": affinity, "both": priority | affinity}
    settings: dict[str, dict[str, Any]] = {"none": {}}
    for name, more in wanted.items():
        try:
            Host(more.get("io_priority", "none"), more.get("cpu_affinity_mask")).restore()
        except ConfigError as error:
            result.notes.append(f"{name}: left out, {error}")
        else:
            settings[name] = more
    return settings


def _listed(mask: int) -> str:
    return ",".join(map(str, cores_of(mask)))


def _one(traffic: Traffic, plan: Plan, more: dict[str, Any], side: Side) -> list[list[int]]:
    """A fresh engine under these settings; what it wrote."""
    with traffic.load(engine_mode=plan.engine_mode, **more) as engine:
        about = engine.describe()
        engine.settings.expert_cache_bytes = max(
            about["expert_cache_least_bytes"], about["experts_total_bytes"] * plan.budget // 100
        )
        latencies, block, written = _watched(traffic, engine)
        side.rounds.append(latencies[int(WARM * len(latencies)) :])
        side.delay.append(block.delay_s / block.wall_s)
        side.waits_ms.append(1e3 * float(engine.counters()["pager"]["io_wait_s"]) / block.work)
    return written


def _watched(traffic: Traffic, engine: Engine) -> tuple[list[float], Any, list[list[int]]]:
    """(ms of each step of one row, time, what was written)."""
    cursor = engine.telemetry.cursor()
    block, written = traffic.run(engine)
    batch = engine.telemetry.read(cursor)
    if batch.missing:
        raise ValueError("--tokens: more rows than telemetry keeps; ask for fewer")
    rows = batch.tokens[batch.tokens["rows"] == 1]
    return (rows["latency_ns"] / 1e6).tolist(), block, written


def _report(result: Result, sides: dict[tuple[str, str], Side], names: Sequence[str]) -> None:
    for where in (ALONE, BESIDE):
        for name in names:
            side = sides[where, name]
            peer = (where, "none") if name != "none" else (ALONE, "none")
            for share in SHARES:
                value = percentile(side.all, share / 100)
                if (where, name) == peer:
                    result.add(f"{where}, {name}: p{share}", value, "ms/token")
                else:
                    result.add(f"{where}, {name}: p{share}", value, "ms/token", peer=", ".join(peer),
                               peer_value=percentile(sides[peer].all, share / 100), smaller_is_better=True)  # fmt: skip
            result.add(f"{where}, {name}: waiting for pages", statistics.median(side.waits_ms), "ms/token")


def _verdict(result: Result, sides: dict[tuple[str, str], Side], names: Sequence[str]) -> None:
    """Beside the neighbour: does a setting cut P99 in every round, in none, or now and then?"""
    plain = sides[BESIDE, "none"].tail()
    for name in names:
        if name == "none":
            continue
        ratios = [p / max(mine, 1e-9) for p, mine in zip(plain, sides[BESIDE, name].tail(), strict=True)]
        low, high = min(ratios), max(ratios)
        if low > 1.1:
            said = "helps: P99 is lower in every round"
        elif high < 0.9:
            said = "harms: P99 is higher in every round"
        else:
            said = "no difference that stands out of the noise"
        result.notes.append(f"{name}, beside the neighbour: {said} (none over it {low:.2f} to {high:.2f})")
