"""Exact against expert-local attention: bytes, speed and what it does to the text; and what placing tokens costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, spread
from colibri_lab.bench.history import CHUNK, History, unlock_routing, weights_of
from colibri_lab.bench.peer import LlamaPeer
from colibri_lab.bench.quality import documents, first_documents, mean_loss
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.kv.cache import KVCache
from colibri_lab.kv.rule import RECENT, SINKS
from colibri_lab.kv.slots import SlotPool, allocate
from colibri_lab.ops.probe import read_bandwidth, usable_processors
from colibri_lab.paths import embedded_model

MODES = {"expert_local": (RECENT, SINKS), "exact": (0, 0)}
CLAIM = 28.0  # per cent fewer bytes at 32 K, somebody's figure
REAL = 1024  # tokens of a history that are computed; the rest repeats them
SLOT = 256
RATIO_SPREAD = 0.10  # between the quartiles of the rounds' ratios


@dataclass(frozen=True)
class Plan:
    """tokens: decoded in a round after a history of each of `lengths`."""

    shape: Shape
    lengths: Sequence[int] = (4096, 16384, 32768)
    threads: int = 1
    rounds: int = 5
    tokens: int = 8
    seed: int = 0
    characters: int = 12000  # of each domain, for perplexity


@dataclass
class Side:
    """One mode's rounds at one length."""

    blocks: list[Block]
    logits: NDArray[np.float32]  # [T, V], the same in every round
    attention: list[float]  # seconds a token in attn_router
    seen: NDArray[np.float64]  # a token's share of ops.types.SEEN


def run(folder: Path, plan: Plan, peer: str = "none", python: str | None = None) -> Result:
    """peer: llama.cpp reads all of each history itself, which takes it minutes.

    ValueError for histories that are too short to compute or a folder without texts."""
    if peer not in ("none", LlamaPeer.name):
        raise ValueError(f"--peer {peer!r}: kv compares with llama.cpp alone")
    if min(plan.lengths) < REAL:
        raise ValueError(f"--lengths: at least {REAL} tokens each")
    texts = {path.stem: first_documents(documents(path), plan.characters) for path in sorted(folder.glob("*.txt"))}
    if not texts:
        raise ValueError(f"{folder} holds no .txt files; a checkout has them in data/validation")
    result = Result(f"kv {plan.shape.name}")
    with ExitStack() as stack:
        llama = None if peer == "none" else stack.enter_context(LlamaPeer(python))
        _long(plan, result, llama)
    _text(texts, plan.threads, result)
    _placing(max(plan.lengths), plan.shape, result)
    return result


def _long(plan: Plan, result: Result, llama: LlamaPeer | None) -> None:
    shape = replace(plan.shape, positions=max(plan.lengths) + plan.tokens + 1)
    slots = shape.layers * (math.ceil(max(plan.lengths) / SLOT) + 64)
    random = np.random.default_rng(plan.seed)
    ids, new = (random.integers(0, shape.vocab, n).tolist() for n in (REAL, plan.tokens))
    if llama is not None:
        llama.file(plan.shape, plan.seed, ours.folder())
        llama.load(shape, plan.seed, ours.folder(), plan.threads)
        result.notes.append(f"{llama.name}: {llama.settings}; it computes all of a history, of random tokens too")
    rates: list[tuple[float, float]] = []  # bytes and seconds of a token's exact attention, at each length
    settings = {"max_batch_size": 1, "kv_cache_slot_size": SLOT, "kv_cache_max_slots": slots, "telemetry": False}
    with ours.load(shape, plan.seed, plan.threads, **settings) as engine:
        unlock_routing(engine, ids[: REAL // 2])
        history = History(engine, ids)
        history.read(REAL)
        _routing(history, result)
        each = 2 * shape.kv_heads * shape.head_dim * 2  # bytes of a token's key and value in a layer, fp16
        for length in sorted(plan.lengths):
            history.repeat(length)
            beside = None if llama is None else _peers(llama, random.integers(0, shape.vocab, length).tolist(), new)
            sides, theirs = _sides(history, new, plan.rounds, beside)
            if llama is not None:
                _beside(f"{length} tokens", sides["exact"].blocks, theirs, llama, plan, result)
            _report(f"{length} tokens", sides, each, plan, result)
            rates.append((sides["exact"].seen[0] * each, min(sides["exact"].attention)))
        history.close()
    (less, sooner), (more, later) = rates[0], rates[-1]
    if len(rates) > 1:
        memory = read_bandwidth(plan.threads)
        speed = (more - less) / max(later - sooner, 1e-9) / 1e9
        result.add("exact attention reads a longer history", speed, "GB/s", limit=memory)
    result.notes.append(
        f"{REAL} tokens of each history are computed, the rest repeats their keys (turned to their position), values "
        f"and first experts; {plan.rounds} rounds of {plan.tokens} tokens in turn, {plan.threads} thread(s)"
    )
    result.notes.append(f"expert_local: the tokens of a query's experts, the newest {RECENT} and the first {SINKS}")
    result.notes.append(
        "gates without the direction that all hidden states share: else random weights send every token the same way"
    )


def _peers(llama: LlamaPeer, ids: list[int], new: list[int]) -> Callable[[], Block]:
    """What a round of the peer is, after it has read a history of its own."""
    llama.history(ids, usable_processors())

    def once() -> Block:
        llama.after(len(ids), new[:1])
        return llama.after(len(ids), new)

    return once


def _beside(what: str, mine: list[Block], theirs: list[Block], llama: LlamaPeer, plan: Plan, result: Result) -> None:
    one = plan.threads == 1
    rates = [[b.cpu_rate if one else b.wall_rate for b in side] for side in (mine, theirs)]
    result.add(f"{what}: exact decode, {'CPU' if one else 'wall'} time", statistics.median(rates[0]), "tokens/s",
               peer=llama.name, peer_value=statistics.median(rates[1]))  # fmt: skip
    if (apart := spread([a / b for a, b in zip(*rates, strict=True)])) > RATIO_SPREAD:
        result.reasons.append(f"{what}: the ratios to {llama.name} differ by {apart:.0%} between their quartiles")


def _sides(
    history: History, new: list[int], rounds: int, beside: Callable[[], Block] | None
) -> tuple[dict[str, Side], list[Block]]:
    """Rounds of both modes over one history, in turn, and the peer's."""
    sides: dict[str, Side] = {}

    def once(mode: str) -> Block:
        history.attend(*MODES[mode])
        history.decode(new[:1])  # threads and tables are warm
        before = history.seen()
        block, logits, attention = history.decode(new)
        seen = (history.seen() - before) / len(new)
        side = sides.setdefault(mode, Side([], logits, [], seen))
        assert np.array_equal(side.logits, logits)
        side.attention.append(attention / 1e9 / len(new))
        return block

    work: dict[str, Callable[[], Block]] = {mode: partial(once, mode) for mode in MODES}
    if beside is not None:
        work["peer"] = beside
    blocks = interleave(rounds, work)
    for mode, side in sides.items():
        side.blocks = blocks[mode]
    return sides, blocks.get("peer", [])


def _report(what: str, sides: dict[str, Side], each: int, plan: Plan, result: Result) -> None:
    local, exact = sides["expert_local"], sides["exact"]
    read, all_, guessed, recalled = local.seen
    assert exact.seen[0] == exact.seen[1] == all_
    result.add(f"{what}: attention reads", read * each / 1e6, "MB a token", peer="exact", peer_value=all_ * each / 1e6,
               smaller_is_better=True)  # fmt: skip
    result.add(f"{what}: fewer bytes", (1 - read / all_) * 100, "%", peer="claim at 32 K", peer_value=CLAIM)
    one = plan.threads == 1  # with more threads CPU time counts waiting too
    for clock in ("CPU", "wall") if one else ("wall",):
        mine, theirs = ([getattr(b, f"{clock.lower()}_rate") for b in side.blocks] for side in (local, exact))
        result.add(f"{what}: decode, {clock} time", statistics.median(mine), "tokens/s",
                   peer="exact", peer_value=statistics.median(theirs))  # fmt: skip
        apart = spread([a / b for a, b in zip(mine, theirs, strict=True)])
        if apart > RATIO_SPREAD and (clock == "CPU") == one:
            result.reasons.append(f"{what}: the rounds' ratios differ by {apart:.0%} between their quartiles")
    change = np.linalg.norm(local.logits - exact.logits, axis=1) / np.linalg.norm(exact.logits, axis=1)
    same = int((local.logits.argmax(axis=1) == exact.logits.argmax(axis=1)).sum())
    result.add(f"{what}: logits change", float(np.median(change)) * 100, "% of their norm")
    result.add(f"{what}: same first choice", same, f"of {len(change)}")
    result.add(f"{what}: first expert among the guessed", recalled / guessed * 100, "%")


def _routing(history: History, result: Result) -> None:
    """How first experts are spread: the fewer there are, the more tokens are a query's own."""
    shares = history.first_experts().astype(np.float64)
    even = np.exp(-(shares * np.log(shares + 1e-12)).sum(axis=1))
    result.add("first experts of a layer, as if evenly used", float(np.median(even)), f"of {shares.shape[1]} (median)")
    result.add("largest share of one expert", float(np.median(shares.max(axis=1))) * 100, "% of tokens (median layer)")


def _text(texts: dict[str, list[str]], threads: int, result: Result) -> None:
    """Perplexity of the embedded model, whose routing and context are real; control: near tokens alone."""
    losses: dict[str, dict[str, float]] = {}
    counted: dict[str, dict[str, int]] = {}
    for mode in ("exact", "expert_local", "near tokens alone"):
        attention = "expert_local" if mode == "expert_local" else "exact"
        with Engine.load(embedded_model(), threads=threads, max_batch_size=1, prefill_chunk=256, telemetry=False,
                         attention=attention) as engine:  # fmt: skip
            if mode == "near tokens alone":
                only_near(engine, RECENT + SINKS)
            losses[mode] = {domain: mean_loss(engine, parts) for domain, parts in texts.items()}
            counted[mode] = engine._parts.kv.counters()

    def times(mode: str, domains: list[str]) -> float:
        """A mode's perplexity over exact attention's, on these texts."""
        return math.exp(statistics.mean(losses[mode][domain] - losses["exact"][domain] for domain in domains))

    for what, domains in (*((domain, [domain]) for domain in texts), ("all", list(texts))):
        result.add(f"embedded model, {what}: perplexity", times("expert_local", domains), "times exact's",
                   peer="near tokens alone", peer_value=times("near tokens alone", domains),
                   smaller_is_better=True)  # fmt: skip
    seen, near = counted["expert_local"], counted["near tokens alone"]["attention_tokens"]
    fewer = 1 - seen["attention_bytes"] / seen["attention_bytes_exact"]
    result.add("embedded model, prompts of up to 1 K: fewer bytes", fewer * 100, "%")
    far = (seen["attention_tokens"] - near) / max(1, seen["attention_tokens_exact"] - near)
    result.add("embedded model: read of the tokens that are not near", far * 100, "%")
    recall = seen["attention_recalled"] / max(1, seen["attention_guessed"])
    result.add("embedded model: first expert among the guessed", recall * 100, "%")


def only_near(engine: Engine, window: int) -> None:
    """Exact attention over a sliding window in all layers: what expert_local would be without its experts."""
    p = engine._parts
    weights = weights_of(engine)
    layers = tuple(replace(layer, attention=replace(layer.attention, window=window)) for layer in weights.layers)
    p.backend.bind(replace(weights, layers=layers), p.kv.pool, p.pager.arrays, p.rows)


def _placing(longest: int, shape: Shape, result: Result) -> None:
    """Python's part of a prompt, which must not grow with what is there already: a chunk's places in a layer."""
    slots = longest // SLOT + 64
    pool = allocate(slots, SLOT, CHUNK, 1, 2, "fp16", 1, 1, longest)
    rows = np.zeros(CHUNK, np.int32)
    kv = KVCache(pool, SlotPool(slots, SLOT), 1, rows)
    seat, took = kv.open(0), []
    experts = np.random.default_rng(0).zipf(1.3, longest) % shape.experts
    for start in range(0, longest - CHUNK + 1, CHUNK):
        first = experts[start : start + CHUNK].tolist()
        kv.begin([seat] * CHUNK)
        begin = perf_counter()
        kv.place(0, first)
        took.append((perf_counter() - begin) / CHUNK * 1e6)
        pool.where[seat, 0, start : start + CHUNK], pool.first[seat, 0, start : start + CHUNK] = rows, first
    early, late = (statistics.median(part) for part in (took[: REAL // CHUNK], took[-REAL // CHUNK :]))
    result.add(f"placing a prompt's token in a layer, after {longest} tokens", late, "us",
               peer=f"within the first {REAL}", peer_value=early, smaller_is_better=True)  # fmt: skip
