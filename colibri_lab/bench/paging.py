"""What policies and prefetchers are worth: the same text under every budget, beside the best that a cache could do.

Each run is a fresh engine with cold frames. Its tokens must be those of the run that holds all experts, so all runs
ask for the same experts in the same order, and Belady on the recorded trace is a bound for each of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_lab.analysis.accesses import Accesses, accesses
from colibri_lab.analysis.simulate import simulate
from colibri_lab.bench.disk import disk_delay, disk_rate
from colibri_lab.bench.harness import Block
from colibri_lab.bench.ours import EMBEDDED, make_model
from colibri_lab.bench.quality import documents
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.bench.traffic import Traffic, texts, zipf_markov
from colibri_lab.config import EVICTION, PREFETCH, several

LONG = 300  # tokens written of a text that is replayed alone
DELAY_SHARE = 0.10  # of wall time that threads may wait for a core before waits are not to be trusted


@dataclass(frozen=True)
class Plan:
    """What is run: budgets in per cent of all experts, names, tokens written after each text's beginning (or read)."""

    budgets: Sequence[int] = (25, 50, 75)
    policies: Sequence[str] = EVICTION
    prefetchers: Sequence[str] = PREFETCH
    tokens: int = 96
    rounds: int = 1
    threads: int = 1
    mode: str = "sync"  # engine_mode of the runs under a budget


@dataclass
class Run:
    """One engine's figures, decode steps only where a phase matters."""

    pager: dict[str, Any]
    block: Block
    texts: list[list[int]]

    @property
    def hit_rate(self) -> float:
        """Per cent of all experts asked for that were there at once."""
        hits, faults = int(self.pager["hits"]), int(self.pager["faults"])
        return 100 * hits / max(1, hits + faults)

    @property
    def wait_ms(self) -> float:
        """Milliseconds of I/O wait for a token."""
        return 1e3 * float(self.pager["io_wait_s"]) / self.block.work


def run(folder: Path, plan: Plan, shape: Shape | None = None) -> Result:
    """The embedded model on the beginnings of the texts in `folder`, or a shape on a Zipf-Markov trace.

    ValueError for a folder without texts, and for wrong names.
    """
    _check(plan)
    result = Result(f"paging {shape.name if shape else EMBEDDED}")
    if shape is not None:
        traffic = zipf_markov(make_model(shape, 0), shape, plan.tokens, plan.threads)
    else:
        beginnings = {path.stem: documents(path)[0] for path in sorted(folder.glob("*.txt"))}
        if not beginnings:
            raise ValueError(f"{folder} holds no .txt files; a checkout has them in data/validation")
        traffic = texts(list(beginnings.values()), plan.tokens, plan.threads)
        _own_traces(result, plan, beginnings)
    whole, trace, facts = _reference(traffic)
    everything = facts["experts_total_bytes"] // facts["expert_bytes"]
    result.add("disk, experts in random order", disk_rate(facts["path"]) / 1e9, "GB/s")
    asking, there = disk_delay(facts["path"])
    result.add("disk, asking for one expert", 1e6 * asking, "us")
    result.add("disk, one expert, from asking until it is there", 1e6 * there, "us")
    result.add("all experts in memory", whole.block.wall_rate, "tokens/s")
    for share in plan.budgets:
        capacity = everything * share // 100
        best = {name: 100 * simulate(trace, capacity, name).hit_rate for name in ("belady_forced", "belady", "lru")}
        result.add(f"{share} %, belady", best["belady"], "% hits")
        result.add(f"{share} %, belady, forced admission", best["belady_forced"], "% hits", limit=best["belady"])
        for policy in plan.policies:
            rate = disk_rate(facts["path"], 0.5)  # other guests' reads change it from minute to minute
            _one_policy(result, plan, traffic, whole, (share, capacity, policy), best, rate)
    result.notes.append(
        f"{traffic.said}; {plan.mode}, {plan.threads} thread, {facts['expert_bytes'] // 1024} KiB an expert, "
        f"{'O_DIRECT' if facts['direct_io'] else 'buffered reads'}; every run said the same tokens"
    )
    result.notes.append("a wait's limit: bytes asked for over the disk's rate, less the compute they could hide behind")
    return result


def _own_traces(result: Result, plan: Plan, beginnings: dict[str, str]) -> None:
    """Each text alone, which stays in its domain: all policies replayed on the route of its own run."""
    for domain, text in beginnings.items():
        _, trace, facts = _reference(texts([text], LONG, plan.threads))
        everything = facts["experts_total_bytes"] // facts["expert_bytes"]
        for share in plan.budgets:
            rates = {
                name: 100 * simulate(trace, everything * share // 100, name).hit_rate
                for name in ("belady_forced", "lru", *plan.policies)
            }
            for name in plan.policies:
                peer = None if name == "lru" else "lru"
                result.add(f"{domain} alone, {share} %, {name}", rates[name], "% hits", peer=peer,
                           peer_value=rates["lru"] if peer else None, limit=rates["belady_forced"])  # fmt: skip
                if name != "lru":
                    _closed(result, f"{domain} alone, {share} %, {name}", rates[name], rates)


def _closed(result: Result, name: str, hits: float, rates: dict[str, float]) -> None:
    """The part of the way from lru to Belady with forced admission that `hits` (per cent) goes."""
    way = rates["belady_forced"] - rates["lru"]
    if way > 0:
        result.add(f"{name}: closes", 100 * (hits - rates["lru"]) / way, "% of lru's distance to belady")


def _one_policy(result: Result, plan: Plan, traffic: Traffic, whole: Run, where: tuple[int, int, str],
                best: dict[str, float], rate: float) -> None:  # fmt: skip
    share, capacity, policy = where
    plain: Run | None = None
    for prefetcher in plan.prefetchers:
        name = f"{share} %, {policy}, {prefetcher}"
        settings = {"eviction_policy": policy, "prefetcher": prefetcher, "engine_mode": plan.mode}
        runs = [_run(traffic, capacity, **settings) for _ in range(plan.rounds)]
        for one in runs:
            if one.texts != whole.texts:
                raise RuntimeError(f"{name}: other tokens than with all experts in memory")
        mine = sorted(runs, key=lambda r: r.wait_ms)[len(runs) // 2]
        wait, speed = (
            statistics.median(values) for values in zip(*((r.wait_ms, r.block.wall_rate) for r in runs), strict=True)
        )
        result.add(f"{name}: hit rate", mine.hit_rate, "% hits",
                   limit=best["belady_forced"] if prefetcher == "none" else None)  # fmt: skip
        if plain is None and prefetcher == "none":
            plain = mine
        if prefetcher == "none" or plain is None:
            if prefetcher == "none" and policy != "lru":
                _closed(result, name, mine.hit_rate, best)
            result.add(f"{name}: I/O wait", wait, "ms/token")
        else:
            reads = 1e3 * plain.pager["bytes_read"] / rate / plain.block.work
            compute = 1e3 * plain.block.wall_s / plain.block.work - plain.wait_ms
            result.add(f"{name}: I/O wait", wait, "ms/token", peer="none", peer_value=plain.wait_ms,
                       limit=max(0.0, reads - compute), smaller_is_better=True)  # fmt: skip
            for what in ("hits", "late", "wasted"):
                result.add(f"{name}: {what}", mine.pager[f"prefetch_{what}"] / mine.block.work, "experts/token")
            recall = mine.pager["decode_prefetch_recall"] or mine.pager["prefill_prefetch_recall"]
            result.add(f"{name}: recall", 100 * recall, "% of experts asked for")
        result.add(f"{name}: faults", mine.pager["faults"] / mine.block.work, "experts/token")
        result.add(f"{name}: speed", speed, "tokens/s", limit=whole.block.wall_rate)
        delay = statistics.median(r.block.delay_s / r.block.wall_s for r in runs)
        if delay > DELAY_SHARE:
            result.reasons.append(f"{name}: threads waited for a core {delay:.0%} of the time")


def _reference(traffic: Traffic) -> tuple[Run, Accesses, dict[str, Any]]:
    """A run with all experts in memory; warm where the router does not forbid to run twice."""
    with traffic.load(expert_cache_bytes=1 << 40) as engine:
        cursor = engine.telemetry.cursor()
        block, said = traffic.run(engine)
        batch = engine.telemetry.read(cursor)
        if batch.missing:
            raise ValueError("--tokens: more rows than telemetry keeps; ask for fewer")
        facts = engine.describe()
        trace = accesses(batch.tokens, batch.route, facts["experts"])
        if traffic.router is None:
            block, said = traffic.run(engine)
        else:
            block.wall_s -= engine.counters()["pager"]["io_wait_s"]
        return Run(engine.counters()["pager"], block, said), trace, facts


def _run(traffic: Traffic, capacity: int, **settings: Any) -> Run:
    with traffic.load(**settings) as engine:
        engine.settings.expert_cache_bytes = capacity * engine.describe()["expert_bytes"]
        block, said = traffic.run(engine)
        return Run(engine.counters()["pager"], block, said)


def _check(plan: Plan) -> None:
    for option, given, known in (("policies", plan.policies, EVICTION), ("prefetchers", plan.prefetchers, PREFETCH)):
        for name in given:
            if name not in known and not (known is PREFETCH and several(name)):
                raise ValueError(f"--{option} {name!r} is none of {', '.join(known)}")
    for share in plan.budgets:
        if not 2 <= share <= 100:
            raise ValueError(f"--budgets {share}: per cent of all experts, 2 to 100")
