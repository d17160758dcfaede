"""Too little memory for the model: ours under its own budget beside llama.cpp under the system's, both cold."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench import ours
from colibri_lab.bench.batch import memory
from colibri_lab.bench.cold import forget
from colibri_lab.bench.disk import disk_rate
from colibri_lab.bench.harness import Block, measured
from colibri_lab.bench.memgroup import MemoryGroup
from colibri_lab.bench.peer import LlamaPeer
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import GROUP, Shape
from colibri_lab.bench.traffic import ImposedRouter
from colibri_lab.engine.engine import Engine
from colibri_lab.model.plan import make_plan
from colibri_lab.planning.cost import PROCESS
from colibri_lab.planning.misses import ASSUMED

DELAY_SHARE = 0.25  # of wall time that threads may wait for a core; most of it is the disk's


@dataclass(frozen=True)
class Plan:
    """share: of the model's bytes, per cent, that all memory of a side may be. tokens: read one by one."""

    shape: Shape
    share: int = 54
    tokens: int = 64
    peer_tokens: int = 8
    rounds: int = 3
    threads: int = 2
    mode: str = "sync"
    prefetcher: str = "none"
    seed: int = 0

    @property
    def limit(self) -> int:
        """Bytes of memory of a side."""
        layout = make_plan(ours.spec_of(self.shape), "int4", GROUP)
        return (layout.all_expert_bytes + layout.resident_bytes) * self.share // 100


def run(plan: Plan, peer: str = "none", peer_python: str | None = None) -> Result:
    """ValueError for a share that does not hold the resident weights; NotAvailable without a memory group."""
    if peer not in ("none", LlamaPeer.name):
        raise ValueError(f"--peer {peer!r}: budget compares with llama.cpp alone")
    result = Result(f"budget {plan.shape.name}")
    layout = make_plan(ours.spec_of(plan.shape), "int4", GROUP)
    room = plan.limit - layout.resident_bytes - int(PROCESS)
    if room < layout.expert_bytes * plan.shape.top_k:
        raise ValueError(
            f"--share {plan.share}: {plan.limit / 1e6:.0f} MB do not hold the resident weights and a layer"
        )
    path = ours.make_model(plan.shape, plan.seed)
    ids = np.random.default_rng(plan.seed).integers(0, plan.shape.vocab, plan.tokens).tolist()
    theirs = None if peer == "none" else _peer(plan, peer_python, ids, result)
    rate, own = disk_rate(path), partial(_ours, plan, path, room, ids)
    routes = zipf_markov_routes(plan.shape.layers, plan.shape.experts, plan.shape.top_k, plan.tokens + 1, seed=1)
    delays = _rows("decode, cold, wall time", plan, [own() for _ in range(plan.rounds)], rate, theirs, result)
    spread_out = [own(router=ImposedRouter(routes)) for _ in range(plan.rounds)]
    delays += _rows("decode, cold, routes of changing topics", plan, spread_out, rate, None, result)
    result.add("experts in memory", 100 * room / layout.all_expert_bytes, "% of all")
    result.add("disk, experts in random order, four at a time", rate / 1e9, "GB/s")
    result.notes.append(
        f"{plan.share} % of the model's {plan.limit / plan.share / 1e4:.0f} MB for a side; {plan.tokens} random tokens "
        f"one by one from empty frames, {plan.threads} thread(s), {plan.mode}, prefetcher {plan.prefetcher}; the limit "
        "is the disk's rate over the bytes that were read"
    )
    result.notes.append(
        "random weights send most tokens the same way, so few experts are asked for; changing topics: other routes are "
        f"imposed on ours ({ASSUMED})"
    )
    delay = statistics.median(delays)
    if delay > DELAY_SHARE:
        result.reasons.append(f"threads waited for a core {delay:.0%} of the time")
    return result


@dataclass(frozen=True)
class Run:
    """One engine from empty frames: its time, what its pager counted, bytes of anonymous memory."""

    block: Block
    pager: dict[str, float]
    used: int


def _rows(what: str, plan: Plan, runs: list[Run], rate: float, theirs: Block | None,
          result: Result) -> list[float]:  # fmt: skip
    """Rows of some runs; the share of wall time that each waited for a core."""
    speed = statistics.median(run.block.wall_rate for run in runs)
    read = statistics.median(run.pager["bytes_read"] for run in runs) / plan.tokens
    result.add(what, speed, "tokens/s", peer=None if theirs is None else LlamaPeer.name,
               peer_value=None if theirs is None else theirs.wall_rate, limit=rate / read)  # fmt: skip
    hits, faults = (sum(run.pager[name] for run in runs) for name in ("hits", "faults"))
    result.add(f"{what}: hits", 100 * hits / max(1, hits + faults), "% of the experts asked for")
    result.add(f"{what}: read", read / 1e6, "MB/token")
    result.add(f"{what}: waiting for pages", 100 * statistics.median(
        run.pager["io_wait_s"] / run.block.wall_s for run in runs), "% of wall time")  # fmt: skip
    result.add(f"{what}: memory, anonymous", max(run.used for run in runs) / 1e6, "MB", limit=plan.limit / 1e6)
    return [run.block.delay_s / run.block.wall_s for run in runs]


def _ours(plan: Plan, path: Path, room: int, ids: list[int], **more: Any) -> Run:
    forget(path)
    gc.collect()  # or the frames of the engine before would count too
    settings = {"prefill_chunk": 1, "max_batch_size": 1, "kv_cache_max_slots": 512, "pin_after_tokens": None}
    with Engine.load(path, threads=plan.threads, engine_mode=plan.mode, expert_cache_bytes=room, telemetry=False,
                     prefetcher=plan.prefetcher, **(settings | more)) as engine:  # fmt: skip
        with measured(len(ids)) as block:
            for _ in engine.generate(ids, max_tokens=1):
                pass
        return Run(block, dict(engine.counters()["pager"]), memory(engine).get("anonymous memory", 0))


def _peer(plan: Plan, python: str | None, ids: list[int], result: Result) -> Block:
    """llama.cpp with its file mapped and its weights as they lie there: laid out anew they would not fit at all."""
    with MemoryGroup(plan.limit) as group, LlamaPeer(python, repack=False) as llama:
        file = llama.file(plan.shape, plan.seed, ours.folder())
        forget(file)
        group.take(llama.pid)
        llama.load(plan.shape, plan.seed, ours.folder(), plan.threads)
        _, block = llama.decode(ids[:1], ids[1 : 1 + plan.peer_tokens])
        result.notes.append(
            f"{llama.name}: {llama.settings}, {plan.peer_tokens} tokens in a memory group of {plan.limit / 1e6:.0f} MB"
        )
    return block
