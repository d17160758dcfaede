"""How fast one token after another is made: ours, a peer's, and what the memory would allow."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, spread
from colibri_lab.bench.peer import LlamaPeer
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import SHAPES, Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.ops.probe import read_bandwidth

RATIO_SPREAD = 0.10  # between the quartiles of the rounds' ratios
RATE_SPREAD = 0.20
DELAY_SHARE = 0.10  # of wall time, where wall time is the figure


@dataclass(frozen=True)
class Plan:
    """What to run. tokens: decoded in a round after a prompt of `prompt` tokens."""

    shape: Shape
    threads: int = 1
    rounds: int = 5
    tokens: int = 32
    prompt: int = 128
    seed: int = 0
    precision: str = "fast"


@dataclass
class Rounds:
    """Blocks of all rounds, ours and the peer's side by side."""

    prompt: list[Block] = field(default_factory=list)
    decode: list[Block] = field(default_factory=list)
    peer_prompt: list[Block] = field(default_factory=list)
    peer_decode: list[Block] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # GB/s


def run(
    plan: Plan, peer: str = "none", peer_python: str | None = None, repack: bool = True, mmap: bool = True
) -> Result:
    """Rounds of probe, ours, peer, in turn; the peer in a process of its own. PeerError when there is no peer."""
    result = Result(f"decode {plan.shape.name}")
    if peer == "none":
        with _engine(plan) as engine:
            _report(plan, _rounds(plan, engine, None), result, None)
        return result
    with LlamaPeer(peer_python) as llama:  # first, so that a missing peer costs no time
        llama.load(plan.shape, plan.seed, ours.folder(), plan.threads, repack, mmap)
        with _engine(plan) as engine:
            rounds = _rounds(plan, engine, llama)
            _report(plan, rounds, result, llama)
            _agreement(plan, engine, llama, result)
    return result


def _engine(plan: Plan) -> Engine:
    return ours.load(
        plan.shape, plan.seed, plan.threads, precision=plan.precision, max_batch_size=1, kv_cache_max_slots=1024
    )


def _prompts(plan: Plan, count: int) -> list[list[int]]:
    random = np.random.default_rng(plan.seed)
    return random.integers(0, plan.shape.vocab, (count, plan.prompt)).tolist()  # type: ignore[no-any-return]


def _rounds(plan: Plan, engine: Engine, llama: LlamaPeer | None) -> Rounds:
    found = Rounds()
    prompts = iter(_prompts(plan, plan.rounds + 1))
    current: tuple[list[int], list[int]] = ([], [])

    def mine() -> Block:
        nonlocal current
        prompt = next(prompts)
        prefill, decoded, ids = ours.decode(engine, prompt, plan.tokens)
        current = prompt, ids[:-1]  # what the peer decodes next: the same tokens, so the same experts
        found.prompt.append(prefill)
        return decoded

    def theirs() -> Block:
        assert llama is not None
        prefill, decoded = llama.decode(*current)
        found.peer_prompt.append(prefill)
        return decoded

    def probe() -> Block:
        found.memory.append(read_bandwidth(plan.threads, passes=3))
        return Block()

    sides: dict[str, Callable[[], Block]] = {"memory": probe, "ours": mine}
    if llama is not None:
        sides["peer"] = theirs
    interleave(1, sides)  # a round to warm up: pages read, caches filled, nothing kept
    found.prompt.clear()
    found.peer_prompt.clear()
    found.memory.clear()
    blocks = interleave(plan.rounds, sides)
    found.decode, found.peer_decode = blocks["ours"], blocks.get("peer", [])
    return found


def _report(plan: Plan, rounds: Rounds, result: Result, llama: LlamaPeer | None) -> None:
    one = plan.threads == 1
    clock = "CPU time" if one else "wall time"
    memory = max(rounds.memory)
    floor = memory * 1e9 / plan.shape.active_bytes
    sides = {"decode": (rounds.decode, rounds.peer_decode), "prompt": (rounds.prompt, rounds.peer_prompt)}
    for what, (mine, theirs) in sides.items():
        for name, rate in (("CPU time", lambda b: b.cpu_rate), ("wall time", lambda b: b.wall_rate)):
            if name == "CPU time" and not one:
                continue  # with more threads CPU time counts waiting too
            result.add(
                f"{what}, {plan.threads} thread{'' if one else 's'}, {name}",
                statistics.median(map(rate, mine)),
                "tokens/s",
                peer=llama.name if llama else None,
                peer_value=statistics.median(map(rate, theirs)) if theirs else None,
                limit=floor if what == "decode" and name == clock else None,
            )
    result.add("memory read", memory, "GB/s")
    result.add("weights read for a token", plan.shape.active_bytes / 1e6, "MB")
    delay = statistics.median(b.delay_s / b.wall_s for b in rounds.decode)
    result.add("waiting for a core", delay * 100, "% of wall time")
    result.notes.append(f"ours: int4 in groups of 32, precision {plan.precision}, all experts in memory, telemetry on")
    result.notes.append(f"floor: weights of a token over the fastest memory probe; {plan.rounds} rounds in turn")
    if llama:
        result.notes.append(f"{llama.name}: {llama.settings}, Q4_0, the same weights and tokens")
    _judge(rounds, result, one, delay)


def _judge(rounds: Rounds, result: Result, one: bool, delay: float) -> None:
    def rate(block: Block) -> float:
        return block.cpu_rate if one else block.wall_rate

    mine = [rate(b) for b in rounds.decode]
    if rounds.peer_decode:
        ratios = [a / rate(b) for a, b in zip(mine, rounds.peer_decode, strict=True)]
        if spread(ratios) > RATIO_SPREAD:
            result.reasons.append(f"the rounds' ratios differ by {spread(ratios):.0%} between their quartiles")
    elif spread(mine) > RATE_SPREAD:
        result.reasons.append(f"the rounds' speeds differ by {spread(mine):.0%} between their quartiles")
    if spread(rounds.memory) > RATE_SPREAD:
        result.reasons.append(
            f"memory speed differs by {spread(rounds.memory):.0%} between the quartiles of its probes"
        )
    if not one and delay > DELAY_SHARE:
        result.reasons.append(f"threads waited for a core {delay:.0%} of the wall time")


def _agreement(plan: Plan, engine: Engine, llama: LlamaPeer, result: Result) -> None:
    """Are both computing the same model? Last logits of short prompts; both round activations to 8 bits."""
    distances, same = [], 0
    prompts = _prompts(plan, 4)
    for prompt in (p[:16] for p in prompts):
        mine, theirs = engine.logits(prompt)[-1], llama.logits(prompt)
        distances.append(float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)))
        same += int(mine.argmax() == theirs.argmax())
    result.add("distance of the logits", statistics.median(distances) * 100, "% of their norm", peer=llama.name)
    result.add("same first choice", same, f"of {len(prompts)}", peer=llama.name)


def shape_named(name: str) -> Shape:
    """ValueError names the shapes that there are."""
    if name not in SHAPES:
        raise ValueError(f"--shape {name!r} is none of {', '.join(SHAPES)}")
    return SHAPES[name]
