"""Each CPU kernel alone: bytes and operations a second beside what memory gives, ISA levels side by side.

The kernels are called as the engine calls them, on the weights and tables of a loaded engine, layer after layer and
expert after expert, so that nothing of a model that is larger than the caches is still there when it is read again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, measured, spread
from colibri_lab.bench.history import weights_of
from colibri_lab.bench.pipeline import fill
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import BYTES_PER_WEIGHT, Shape
from colibri_lab.ops.cpu import CpuBackend
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.probe import isa_levels, read_bandwidth
from colibri_lab.ops.types import ExpertPages, KVPool, ModelWeights, Rows
from colibri_lab.pager.frames import Frames

RATE_SPREAD = 0.20  # between the quartiles of the rounds
HISTORY = 2048  # tokens that attention reads
SCATTERED = "64 KiB frames at random"


@dataclass(frozen=True)
class Plan:
    """batches: rows that share an expert's weights. levels: of the kernels, best first; none: all that run here."""

    shape: Shape
    batches: Sequence[int] = (1, 2, 4, 8, 64)
    levels: Sequence[str] = ()
    rounds: int = 5
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Bound:
    """One level's backend on arrays that all levels share."""

    shape: Shape
    backend: CpuBackend
    rows: Rows
    kv: KVPool

    def experts(self, n: int, layers: int) -> Block:
        """n rows through all experts of some layers, top_k at a time."""
        s, rows = self.shape, self.rows
        groups = s.experts // s.top_k
        self._history(1)
        with measured(layers * groups * s.top_k * 3 * s.hidden * s.ffn * BYTES_PER_WEIGHT) as block:
            for layer in range(layers):
                for group in range(groups):
                    rows.experts[:n] = np.arange(group * s.top_k, (group + 1) * s.top_k)
                    self.backend.expert_ffn(layer, n, 0, s.experts)
        return block

    def attention(self, history: int) -> Block:
        """One row through the first half of each layer, after so many tokens."""
        s = self.shape
        weights = 2 * (s.heads + s.kv_heads) * s.head_dim * s.hidden * BYTES_PER_WEIGHT + s.experts * s.hidden * 4
        keys = 2 * (history - 1) * s.kv_heads * s.head_dim * self.kv.k.itemsize
        self._history(history)
        with measured(s.layers * (weights + keys)) as block:
            for layer in range(s.layers):
                self.backend.attn_router(layer, 1)
        return block

    def head(self, n: int) -> Block:
        self.rows.out_row[:n] = range(n)
        with measured(self.shape.vocab * self.shape.hidden * BYTES_PER_WEIGHT) as block:
            self.backend.head(n)
        return block

    def embed(self, n: int) -> Block:
        with measured(n * self.shape.hidden * 2) as block:
            self.backend.embed(n)
        return block

    def results(self) -> list[NDArray[np.float32]]:
        """What a row gives at each station of the first layer: the same bits at every level."""
        rows, found = self.rows, []
        self._history(HISTORY)
        self.backend.embed(1)
        self.backend.attn_router(0, 1)
        found += [rows.x[0].copy(), rows.router_logits[0].copy()]
        rows.experts[0] = np.arange(self.shape.top_k)
        self.backend.expert_ffn(0, 1, 0, self.shape.experts)
        found.append(rows.x[0].copy())
        self.head(1)
        return [*found, rows.logits[0].copy()]

    def _history(self, tokens: int) -> None:
        """The rows are at the end of so many tokens, each layer's in places of their own."""
        self.rows.position[:] = tokens - 1
        self.rows.seat[:] = 0
        for layer in range(self.shape.layers):
            self.kv.where[0, layer, :tokens] = np.arange(tokens) + layer * HISTORY
        self.rows.kv_dst[:] = self.shape.layers * HISTORY  # a place that nobody reads


def run(plan: Plan) -> Result:
    """ValueError for a level or a batch that cannot be."""
    if wrong := [level for level in plan.levels if level not in isa_levels()]:
        raise ValueError(f"--levels {wrong[0]}: this processor runs {', '.join(isa_levels())}")
    if not plan.batches or min(plan.batches) < 1:
        raise ValueError("--batches: numbers from 1")
    result = Result(f"kernels {plan.shape.name}")
    levels = plan.levels or isa_levels()
    most = max(plan.batches)
    shape = replace(plan.shape, positions=HISTORY)
    settings = {"max_batch_size": 1, "prefill_chunk": most, "kv_cache_slot_size": 256, "telemetry": False}
    settings["kv_cache_max_slots"] = shape.layers * HISTORY // 256 + 1
    with ours.load(shape, plan.seed, plan.threads, **settings) as engine:
        fill(engine)
        parts = engine._parts
        weights, pages, rows, kv = weights_of(engine), parts.pager.arrays, parts.rows, parts.kv.pool
        _draw(rows, kv, shape, plan.seed)

        def bound(level: str, where: ExpertPages) -> Bound:
            return _bind(shape, level, plan.threads, (weights, kv, where, rows))

        sides = {level: bound(level, pages) for level in levels}
        sides[SCATTERED] = bound(levels[0], scattered(pages, parts.pager.frames, plan.seed))
        first, *others = (side.results() for side in sides.values())
        for name, found in zip(list(sides)[1:], others, strict=True):
            if any(not np.array_equal(a, b) for a, b in zip(first, found, strict=True)):
                raise RuntimeError(f"{name}: other bits than {levels[0]}")
        _measure(plan, sides, levels, result)
        for side in sides.values():
            side.backend.close()
    result.notes.append(
        f"int4 in groups of 32, {plan.threads} thread(s), {plan.rounds} rounds in turn, all levels with the same bits; "
        f"experts: every one of them, {shape.top_k} a call; GB/s of weights without padding, and of keys and values"
    )
    result.notes.append("a shape that fits into the last-level cache is read from there: m1 has 700 MB of experts")
    return result


def _bind(shape: Shape, level: str, threads: int, arrays: tuple[ModelWeights, KVPool, ExpertPages, Rows]) -> Bound:
    backend = CpuBackend("fast", threads, level)
    backend.bind(*arrays)
    return Bound(shape, backend, arrays[3], arrays[1])


def _draw(rows: Rows, kv: KVPool, shape: Shape, seed: int) -> None:
    """Inputs of all kernels: what is computed does not matter, that it is not zero does."""
    random = np.random.default_rng(seed)
    rows.token[:] = random.integers(0, shape.vocab, rows.capacity)
    rows.ffn_in[:] = random.standard_normal(rows.ffn_in.shape)
    rows.weights[:] = 1 / shape.top_k
    for pool in (kv.k, kv.v):
        pool[:] = random.standard_normal(pool.shape[1:])


def scattered(pages: ExpertPages, frames: Frames, seed: int) -> ExpertPages:
    """The same experts with every 64 KiB page in a frame of its own, drawn at random."""
    used = np.flatnonzero(pages.table.reshape(-1) >= 0)
    old = pages.table.reshape(-1)[used]
    new = np.random.default_rng(seed).permutation(len(used)).astype(np.int32)
    other = Frames(frames.pages, -(-len(used) // frames.pages), 0)
    table = pages.table.copy()
    table.reshape(-1)[used] = new
    other.array[new] = pages.frames.reshape(-1, PAGE)[old]
    return ExpertPages(other.array, table)


def _measure(plan: Plan, sides: dict[str, Bound], levels: Sequence[str], result: Result) -> None:
    best, layers, work = levels[0], plan.shape.layers, dict[str, Callable[[], Block]]()
    memory: list[float] = []
    alone: list[float] = []

    def probe() -> Block:
        memory.append(read_bandwidth(plan.threads, passes=2, streams=4))
        alone.append(read_bandwidth(plan.threads, passes=2, streams=1))
        return Block()

    work["memory"] = probe
    for level in levels:
        side = sides[level]
        for n in plan.batches:
            work[f"experts, {n} row{'s' if n > 1 else ''}, {level}"] = partial(side.experts, n, max(1, layers // n))
        work[f"attention's matrices and router, {level}"] = partial(side.attention, 1)
        work[f"the same after {HISTORY} tokens, {level}"] = partial(side.attention, HISTORY)
        work[f"head, {level}"] = partial(side.head, 1)
        work[f"embedding, {max(plan.batches)} rows, {level}"] = partial(side.embed, max(plan.batches))
    work[f"experts, 1 row, {SCATTERED}"] = partial(sides[SCATTERED].experts, 1, layers)
    work["experts, 1 row, contiguous"] = partial(sides[best].experts, 1, layers)
    interleave(1, work)
    memory.clear()
    alone.clear()
    blocks = interleave(plan.rounds, work)
    del blocks["memory"]
    _report(plan, blocks, max(*memory, *alone), best, result)
    result.add("memory read as the kernels do", statistics.median(memory), "GB/s", peer="one stream",
               peer_value=statistics.median(alone))  # fmt: skip
    if (apart := spread(memory)) > RATE_SPREAD:
        result.reasons.append(f"memory speed differs by {apart:.0%} between the quartiles of its probes")


def _report(plan: Plan, blocks: dict[str, list[Block]], memory: float, best: str, result: Result) -> None:
    def rate(name: str) -> float:
        clock = [b.cpu_rate if plan.threads == 1 else b.wall_rate for b in blocks[name]]
        return statistics.median(clock) / 1e9

    for name, found in blocks.items():
        what, level = name.rsplit(", ", 1)
        many = what.startswith("experts, ") and not what.startswith("experts, 1 row")
        peer = best if level in isa_levels() and level != best else "contiguous" if level == SCATTERED else None
        other = f"{what}, {peer}" if peer else None
        scale = 2 / BYTES_PER_WEIGHT * int(what.split()[1]) if many else 1.0
        result.add(name, scale * rate(name), "GOP/s" if many else "GB/s", peer=peer,
                   peer_value=scale * rate(other) if other else None,
                   limit=None if many or what.startswith("embedding") else memory)  # fmt: skip
        apart = spread([b.cpu_rate if plan.threads == 1 else b.wall_rate for b in found])
        if what == "experts, 1 row" and level != "plain" and apart > RATE_SPREAD:
            result.reasons.append(f"{name}: the rounds differ by {apart:.0%} between their quartiles")
    result.add("memory read", memory, "GB/s")
