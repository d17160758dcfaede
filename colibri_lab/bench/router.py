"""What a router costs and what it gets wrong: recorded and random hidden states, each kind beside softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_lab.bench import early
from colibri_lab.bench.harness import Block, interleave, measured, percentile, spread
from colibri_lab.bench.hidden import BATCH, CHUNK, MOST_ROWS, listen
from colibri_lab.bench.quality import documents, first_documents, mean_loss
from colibri_lab.bench.result import Result
from colibri_lab.engine.engine import Engine
from colibri_lab.ops.router_kernel import RouterKernel
from colibri_lab.ops.routing import COUNTS, F32, KINDS, QUANTISED, Routing, default_bits
from colibri_lab.paths import embedded_model

ROWS = 128  # of a timed call
RANDOM = ((8, 2), (64, 8), (128, 8), (256, 8))  # experts, k
APPROXIMATE = ("int8_lut", "bit_level")
NOISE = 0.15  # of the rounds' ratios, between their quartiles
Kernels = dict[str, list[RouterKernel]]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rows: int = 1_000_000  # different recorded hidden states, at least
    random_rows: int = 100_000  # of each size
    rounds: int = 15
    characters: int = 12_000  # of each domain, for perplexity
    bits: int | None = None  # of the codes; None: 8, and 12 from 65 experts up
    hidden: int = 1024  # width of the random rows
    prompts: int = 16  # for reads between two_stage's stages


def run(folder: Path, plan: Plan) -> Result:
    """ValueError when `folder` holds no texts."""
    texts = [text for path in sorted(folder.glob("*.txt")) for text in documents(path)]
    if not texts:
        raise ValueError(f"{folder} holds no .txt files; a checkout has them in data/validation")
    result = Result("router")
    recorded(result, texts, plan)
    for experts, k in RANDOM:
        random(result, experts, k, plan)
    perplexity(result, folder, plan)
    early.run(result, plan.prompts)
    result.notes.append("wrong: a row whose set of experts differs from softmax's; ns of CPU time, calls of 128 rows")
    result.notes.append(
        "select: from logits to experts and weights; route: from hidden states, gate product included; first stage: of "
        "two_stage, as far as ids that reads may begin with"
    )
    return result


def recorded(result: Result, texts: list[str], plan: Plan) -> None:
    """Every kind on the same rows of the embedded model, one kernel a layer."""
    with Engine.load(embedded_model(), max_batch_size=BATCH, prefill_chunk=CHUNK, telemetry=False) as engine:
        weights = engine._parts.file.weights()
        gates = [layer.gate for layer in weights.layers if layer.gate is not None]
        made = {
            kind: [_kernel(kind, gate, weights.top_k, MOST_ROWS, True, plan.bits) for gate in gates] for kind in KINDS
        }
        timed: list[list[F32]] = [[] for _ in gates]
        unequal = 0

        def sink(layer: int, x: F32) -> None:
            nonlocal unequal
            n = len(x)
            for kind in KINDS:
                made[kind][layer].x[:n] = x
                made[kind][layer].run(n, score=True)
            one, two = made["softmax"][layer], made["two_stage"][layer]
            same = (one.experts[:n] == two.experts[:n]) & (one.weights[:n] == two.weights[:n])
            unequal += int((~same.all(axis=1)).sum())
            if n >= ROWS and len(timed[layer]) < 4:
                timed[layer].append(x[:ROWS].copy())

        rows, distinct = listen(engine, texts, plan.rows, sink)
    name = f"recorded, {len(gates[0])} experts, top-{weights.top_k}"
    result.add(f"{name}: rows", rows, "rows")
    result.add(f"{name}: different rows", distinct, "rows")
    _say_counts(result, name, made)
    result.add(f"{name}, two_stage: rows that differ from softmax in any bit", unequal, f"of {rows}")
    samples = [(gate, x) for gate, parts in zip(gates, timed, strict=True) for x in parts]
    _say_times(result, name, samples, weights.top_k, weights.normalise_top_k, plan)


def random(result: Result, experts: int, k: int, plan: Plan) -> None:
    """Normal gates and rows: logits as uncertain as can be."""
    rng = np.random.default_rng(experts)
    gate = (rng.standard_normal((experts, plan.hidden)) / math.sqrt(plan.hidden)).astype(np.float32) * 2
    made = {kind: [_kernel(kind, gate, k, 1000, True, plan.bits)] for kind in KINDS}
    samples = []
    for i in range(-(-plan.random_rows // 1000)):
        x = rng.standard_normal((1000, plan.hidden)).astype(np.float32)
        samples += [(gate, x[:ROWS])] if i < 4 else []
        for kind in KINDS:
            made[kind][0].x[:] = x
            made[kind][0].run(score=True)
    name = f"random, {experts} experts, top-{k}"
    _say_counts(result, name, made)
    _say_times(result, name, samples, k, True, plan)
    _say_times(result, f"{name} of a softmax over all", samples, k, False, plan)


def perplexity(result: Result, folder: Path, plan: Plan) -> None:
    """Of the embedded model with each router, over all domains."""
    texts = [
        text for path in sorted(folder.glob("*.txt")) for text in first_documents(documents(path), plan.characters)
    ]
    found = {}
    for kind in KINDS:
        bits = plan.bits if kind in QUANTISED else None
        with Engine.load(
            embedded_model(), router=kind, router_quant_bits=bits, max_batch_size=1, prefill_chunk=CHUNK
        ) as engine:
            found[kind] = math.exp(mean_loss(engine, texts))
    for kind in KINDS[1:]:
        exact = found["softmax"]
        result.add(
            f"perplexity, {kind}", found[kind], "perplexity", peer="softmax", peer_value=exact, smaller_is_better=True
        )
        result.add(f"perplexity change, {kind}", (found[kind] / exact - 1) * 100, "%")


def _kernel(
    kind: str, gate: F32, k: int, rows: int, normalise: bool, bits: int | None, audit: bool = True
) -> RouterKernel:
    routing = Routing.make(1, kind, bits or default_bits(len(gate)), audit)
    return RouterKernel(routing, len(gate), k, normalise, rows, gate)


def _say_counts(result: Result, name: str, made: Kernels) -> None:
    for kind in KINDS[1:]:
        counts = sum(kernel.routing.counts[0] for kernel in made[kind])
        c = dict(zip(COUNTS, np.asarray(counts).tolist(), strict=True))
        result.add(f"{name}, {kind}: wrong selections", c["wrong_selections"], f"of {c['audited']}")
        result.add(f"{name}, {kind}: wrong selections", c["wrong_selections"] / c["audited"] * 100, "%")
        if kind != "int8_lut":
            result.add(f"{name}, {kind}: fallback", c["fallback"] / c["rows"] * 100, "% of rows")
        if kind == "two_stage":
            result.add(f"{name}, {kind}: candidates", c["candidates"] / max(1, c["certified"]), "a certified row")


def _say_times(result: Result, name: str, samples: list[tuple[F32, F32]], k: int, normalise: bool, plan: Plan) -> None:
    calls: dict[str, tuple[tuple[str, ...], Callable[[RouterKernel], None]]] = {
        "select": (("softmax", *APPROXIMATE), lambda kernel: kernel.run()),
        "route": (KINDS, lambda kernel: kernel.run(score=True)),
        "first stage": (("two_stage",), lambda kernel: kernel.first_stage(ROWS)),
    }
    for what, (kinds, call) in calls.items():
        sides: dict[str, Callable[[], Block]] = {}
        for kind in kinds:
            kernels = [_kernel(kind, gate, k, ROWS, normalise, plan.bits, audit=False) for gate, _ in samples]
            for kernel, (gate, x) in zip(kernels, samples, strict=True):
                kernel.x[:] = x
                if what == "select":  # nowhere else: NumPy's threads go on burning CPU time for a while
                    kernel.logits[:] = x @ gate.T
            sides[kind] = _side(kernels, call)
        interleave(2, sides)
        blocks = interleave(plan.rounds, sides)
        each = {kind: [block.cpu_s / block.work * 1e9 for block in found] for kind, found in blocks.items()}
        took = {kind: percentile(values, 0.25) for kind, values in each.items()}
        for kind in kinds:
            peer = {} if kind == kinds[0] else dict(peer="softmax", peer_value=took["softmax"])
            result.add(f"{name}, {kind}: {what}", took[kind], "ns a row", smaller_is_better=True, **peer)  # type: ignore[arg-type]
        for kind in kinds[1:]:
            ratios = [a / b for a, b in zip(each["softmax"], each[kind], strict=True)]
            if spread(ratios) > NOISE:
                result.reasons.append(f"{name}, {kind}: {what}: rounds differ by {spread(ratios):.0%}")


def _side(kernels: list[RouterKernel], call: Callable[[RouterKernel], None]) -> Callable[[], Block]:
    """All kernels in turn, often enough for a clock to tell."""
    probe = measured(1)
    with probe as block:
        for kernel in kernels:
            call(kernel)
    again = max(1, min(200, int(0.02 / max(block.wall_s, 1e-6))))

    def run_all() -> Block:
        with measured(again * sum(len(kernel.logits) for kernel in kernels)) as block:
            for _ in range(again):
                for kernel in kernels:
                    call(kernel)
        return block

    return run_all
