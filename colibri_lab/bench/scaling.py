"""Does cost grow as the work grows, and no faster? Exponents of time and memory beside those of the model's own bytes.

An exponent is the slope of a line through the logarithms: 1 is in proportion, 0 is not at all. Engines of one axis take
turns; the context grows in one engine.
"""

from __future__ import annotations

import gc
import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.batch import Plan as BatchPlan
from colibri_lab.bench.batch import Side, anonymous, together
from colibri_lab.bench.harness import Block, interleave, spread
from colibri_lab.bench.history import History
from colibri_lab.bench.result import Result, Row
from colibri_lab.bench.shapes import GROUP, Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.model.plan import make_plan

BASE = Shape("scale", 512, 4, 16, 4, 256, 8, 2, 64, vocab=4096, positions=2048)
AXES = ("experts", "layers", "context", "sequences")
SLACK = 0.10  # by which an exponent may exceed that of the bytes: what a fit of few points is worth
APART = 0.20  # between the quartiles of a point's rounds
REAL, SLOT, PROMPT = 512, 256, 32


@dataclass(frozen=True)
class Plan:
    """The points of each axis; the other sizes are BASE's."""

    experts: Sequence[int] = (8, 32, 128, 512)
    layers: Sequence[int] = (2, 4, 8, 16)
    context: Sequence[int] = (1024, 4096, 16384, 65536)
    sequences: Sequence[int] = (1, 2, 4, 8, 16, 32)
    tokens: int = 16
    rounds: int = 5
    threads: int = 1


@dataclass(frozen=True)
class Point:
    """What one size of an axis costs: seconds and bytes read of a step, bytes held; measured and the model's own."""

    size: int
    rounds: list[float]
    read: float
    held: float
    own: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)


def run(plan: Plan, axes: Sequence[str] = AXES) -> Result:
    """ValueError for an axis that there is not, or of fewer than two sizes."""
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"--only {axis!r} is none of {', '.join(AXES)}")
        if len(getattr(plan, axis)) < 2:
            raise ValueError(f"--{axis}: at least two sizes make a line")
    result, faster = Result("scaling"), 0
    measure: dict[str, Callable[[Plan], list[Point]]] = {
        "experts": partial(_models, "experts"), "layers": partial(_models, "layers"),
        "context": _context, "sequences": _sequences,
    }  # fmt: skip
    for axis in axes:
        faster += _report(axis, measure[axis](plan), result)
    result.add("terms that grow faster than the model's bytes", faster, f"of {2 * len(axes)}")
    result.notes.append(
        f"{BASE.layers} layers, {BASE.experts} experts, top-{BASE.top_k}, hidden {BASE.hidden} where nothing else is "
        f"said; {plan.threads} thread(s), all in memory; an exponent may exceed that of the bytes by {SLACK}"
    )
    result.notes.append(
        "bytes: of a token's weights, keys and values; of several sequences the sum of what each would read alone"
    )
    return result


def _models(axis: str, plan: Plan) -> list[Point]:
    """A model for each size, loaded together."""
    sizes = sorted(getattr(plan, axis))
    shapes = [replace(BASE, **{axis: size}, name=f"{BASE.name}-{axis}-{size}") for size in sizes]
    with ExitStack() as stack:
        engines, held = [], []
        for shape in shapes:
            stack.callback(shutil.rmtree, ours.folder() / f"{shape.name}-0", ignore_errors=True)
            before = _anonymous()
            engine = stack.enter_context(_load(shape, plan.threads))
            ours.decode(engine, _ids(shape, PROMPT), 2)
            for layer in range(shape.layers):
                engine._parts.pager.acquire(layer, range(shape.experts))
            engines.append(engine)
            held.append(_anonymous() - before)
        work = {
            str(shape.name): partial(_decode, engine, shape, plan.tokens)
            for shape, engine in zip(shapes, engines, strict=True)
        }
        blocks = interleave(plan.rounds, work)
    own = [_weights(shape) for shape in shapes]
    times = [_seconds(blocks[shape.name], plan.threads) for shape in shapes]
    return [
        Point(size, rounds, shape.active_bytes, kept, bytes_)
        for size, rounds, shape, kept, bytes_ in zip(sizes, times, shapes, held, own, strict=True)
    ]


def _context(plan: Plan) -> list[Point]:
    """A sequence of each length on one engine; its first tokens are computed, the rest repeats them."""
    lengths = sorted(plan.context)
    shape = replace(BASE, positions=lengths[-1] + plan.tokens + 1, name=f"{BASE.name}-context")
    slots = shape.layers * sum(length // SLOT + 64 for length in lengths)
    token = 2 * shape.kv_heads * shape.head_dim * 2
    held: list[float] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ours.folder() / f"{shape.name}-0", ignore_errors=True)
        start = _anonymous()
        engine = stack.enter_context(_load(shape, plan.threads, kv_cache_slot_size=SLOT, kv_cache_max_slots=slots,
                                           max_batch_size=len(lengths)))  # fmt: skip
        new, first = _ids(shape, plan.tokens), _ids(shape, REAL)
        work: dict[str, Callable[[], Block]] = {}
        for length in lengths:
            before = _anonymous()
            history = History(engine, first)
            stack.callback(history.close)
            history.read(REAL)
            history.repeat(length)
            work[str(length)] = partial(_after, history, new)
            held.append((_anonymous() - before) + (held[0] if held else before - start))
        blocks = interleave(plan.rounds, work)
    kept = [shape.layers * length * token for length in lengths]
    times = [_seconds(blocks[str(length)], plan.threads) for length in lengths]
    return [
        Point(length, rounds, shape.active_bytes + keys, there, _weights(shape) + keys)
        for length, rounds, keys, there in zip(lengths, times, kept, held, strict=True)
    ]


def _after(history: History, ids: Sequence[int]) -> Block:
    return history.decode(ids)[0]


def _sequences(plan: Plan) -> list[Point]:
    """Requests that advance together on one engine; a step's cost."""
    sizes = sorted(plan.sequences)
    shape = replace(BASE, name=f"{BASE.name}-sequences")
    batch = BatchPlan(sizes, plan.tokens, PROMPT, plan.rounds, plan.threads)
    token = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    held: dict[int, float] = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ours.folder() / f"{shape.name}-0", ignore_errors=True)
        before = _anonymous()
        engine = stack.enter_context(_load(shape, plan.threads, max_batch_size=sizes[-1], kv_cache_slot_size=16,
                                           kv_cache_max_slots=1 << 14))  # fmt: skip
        prompts = np.random.default_rng(0).integers(0, shape.vocab, (sizes[-1], PROMPT)).tolist()

        def one(size: int) -> Block:
            block = together(engine, batch, prompts[:size], Side())
            held.setdefault(size, _anonymous() - before)
            return block

        blocks = interleave(plan.rounds, {str(size): partial(one, size) for size in sizes})
    points = []
    for size in sizes:
        seconds = [size * s for s in _seconds(blocks[str(size)], plan.threads)]  # of a step
        points.append(Point(size, seconds, size * shape.active_bytes, held[size],
                            _weights(shape) + size * token * (PROMPT + plan.tokens)))  # fmt: skip
    return points


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the line through the logarithms, least squares."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-12)), 1)[0])


def _report(axis: str, points: list[Point], result: Result) -> int:
    """Rows of one axis; how many of its two terms grow faster than the bytes."""
    sizes, faster = [p.size for p in points], 0
    for p in points:
        step = "step" if axis == "sequences" else "token"
        result.rows.append(Row(f"{axis} {p.size}: a {step}", 1e3 * p.seconds, "ms", "its bytes, MB", p.read / 1e6))
        result.rows.append(Row(f"{axis} {p.size}: memory", p.held / 1e6, "MB", "its bytes, MB", p.own / 1e6))
        if (apart := spread(p.rounds)) > APART:
            result.reasons.append(f"{axis} {p.size}: the rounds differ by {apart:.0%} between their quartiles")
    for what, measured, own in (
        ("time", [p.seconds for p in points], [p.read for p in points]),
        ("memory", [p.held for p in points], [p.own for p in points]),
    ):
        found, bytes_ = exponent(sizes, measured), exponent(sizes, own)
        faster += found > bytes_ + SLACK
        name = f"{axis} {sizes[0]} to {sizes[-1]}: {what}"
        result.rows.append(Row(name, found, "exponent", "its bytes", bytes_))
    return faster


def _load(shape: Shape, threads: int, **settings: object) -> Engine:
    ours.make_model(shape, 0)
    return ours.load(shape, 0, threads, **({"max_batch_size": 1, "kv_cache_max_slots": 256, "telemetry": False}
                                           | settings))  # fmt: skip


def _decode(engine: Engine, shape: Shape, tokens: int) -> Block:
    return ours.decode(engine, _ids(shape, PROMPT), tokens)[1]


def _ids(shape: Shape, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, shape.vocab, count).tolist()  # type: ignore[no-any-return]


def _seconds(blocks: Sequence[Block], threads: int) -> list[float]:
    return [1 / (b.cpu_rate if threads == 1 else b.wall_rate) for b in blocks]


def _weights(shape: Shape) -> float:
    layout = make_plan(ours.spec_of(shape), "int4", GROUP)
    return layout.all_expert_bytes + layout.resident_bytes


def _anonymous() -> float:
    """Bytes of anonymous memory of this process. ValueError where the system does not tell."""
    gc.collect()
    if (held := anonymous()) is None:
        raise ValueError("scaling reads /proc/self/status, which this system does not have")
    return float(held)
