"""How fast one token after another is made: ours, a peer's, and what the memory would allow."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, spread
from colibri_lab.bench.peer import Peer, start
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import GROUP, SHAPES, Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import NotAvailable
from colibri_lab.ops.isa import choose
from colibri_lab.ops.probe import read_bandwidth

RATIO_SPREAD = 0.10  # between the quartiles of the rounds' ratios
RATE_SPREAD = 0.20
DELAY_SHARE = 0.10  # of wall time, where wall time is the figure


@dataclass(frozen=True)
class Plan:
    """What to run. tokens: decoded in a round after a prompt of `prompt` tokens; 0: the prompt is what is looked at."""

    shape: Shape | ours.Given
    threads: int = 1
    rounds: int = 5
    tokens: int = 32
    prompt: int = 128
    seed: int = 0
    precision: str = "fast"
    isa: str | None = None  # of ours, and of transformers beside it; None: the best of each
    chunk: int = 128  # prompt tokens of a step


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
    longest = plan.shape.positions - plan.tokens - 1
    if plan.prompt > longest:
        raise ValueError(f"a prompt of {plan.prompt} is longer than shape {plan.shape.name} leaves room for: {longest}")
    if peer != "none" and isinstance(plan.shape, ours.Given):
        raise ValueError("--peer takes random weights, the same for both: name a --shape, not a --model")
    result = Result(f"{'decode' if plan.tokens else 'prefill'} {plan.shape.name}")
    with kernels_for(plan.isa):
        if peer == "none":
            with _engine(plan) as engine:
                _report(plan, _rounds(plan, engine, None), result, None)
            return result
        assert isinstance(plan.shape, Shape)
        with start(peer, peer_python, repack, mmap, plan.isa) as other:  # first, so that a missing peer costs no time
            other.load(plan.shape, plan.seed, ours.folder(), plan.threads)
            _same_level(plan.isa, other)
            with _engine(plan) as engine:
                rounds = _rounds(plan, engine, other)
                _report(plan, rounds, result, other)
                _agreement(plan, engine, other, result)
    return result


@contextmanager
def kernels_for(isa: str | None) -> Iterator[None]:
    """Engines that are loaded meanwhile use this ISA level. ConfigError for one that this processor does not run."""
    before = os.environ.get("COLIBRI_ISA")
    if isa is not None:
        os.environ["COLIBRI_ISA"] = choose(isa)
    try:
        yield
    finally:
        if isa is not None:
            del os.environ["COLIBRI_ISA"]
            if before is not None:
                os.environ["COLIBRI_ISA"] = before


def _same_level(isa: str | None, peer: Peer) -> None:
    """NotAvailable where a llama.cpp has wider vectors than ours are held to; transformers sees to it in `load`."""
    if isa == "avx2" and peer.name == "llama.cpp" and "AVX512" in peer.settings:
        raise NotAvailable(
            f"--isa avx2 beside {peer.name} in {peer.python}: that is not a llama.cpp built for AVX2; in another "
            'environment CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" pip install '
            "--no-binary llama-cpp-python llama-cpp-python gguf makes one, and --peer-python names it"
        )


def _engine(plan: Plan) -> Engine:
    return ours.load(
        plan.shape, plan.seed, plan.threads, precision=plan.precision, max_batch_size=1, prefill_chunk=plan.chunk,
        kv_cache_max_slots=1024,
    )  # fmt: skip


def _prompts(plan: Plan, count: int) -> list[list[int]]:
    random = np.random.default_rng(plan.seed)
    return random.integers(0, plan.shape.vocab, (count, plan.prompt)).tolist()  # type: ignore[no-any-return]


def _rounds(plan: Plan, engine: Engine, peer: Peer | None) -> Rounds:
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
        assert peer is not None
        prefill, decoded = peer.decode(*current)
        found.peer_prompt.append(prefill)
        return decoded

    def probe() -> Block:
        found.memory.append(read_bandwidth(plan.threads, passes=3))
        return Block()

    sides: dict[str, Callable[[], Block]] = {"memory": probe, "ours": mine}
    if peer is not None:
        sides["peer"] = theirs
    interleave(1, sides)  # a round to warm up: pages read, caches filled, nothing kept
    found.prompt.clear()
    found.peer_prompt.clear()
    found.memory.clear()
    blocks = interleave(plan.rounds, sides)
    found.decode, found.peer_decode = blocks["ours"], blocks.get("peer", [])
    return found


def _report(plan: Plan, rounds: Rounds, result: Result, peer: Peer | None) -> None:
    one = plan.threads == 1
    clock = "CPU time" if one else "wall time"
    memory = max(rounds.memory)
    floor = memory * 1e9 / plan.shape.active_bytes
    sides = {"prompt": (rounds.prompt, rounds.peer_prompt)}
    if plan.tokens:
        sides = {"decode": (rounds.decode, rounds.peer_decode)} | sides
    for what, (mine, theirs) in sides.items():
        for name, rate in (("CPU time", lambda b: b.cpu_rate), ("wall time", lambda b: b.wall_rate)):
            if name == "CPU time" and not one:
                continue  # with more threads CPU time counts waiting too
            result.add(
                f"{what}, {plan.threads} thread{'' if one else 's'}, {name}",
                statistics.median(map(rate, mine)),
                "tokens/s",
                peer=peer.name if peer else None,
                peer_value=statistics.median(map(rate, theirs)) if theirs else None,
                limit=floor if what == "decode" and name == clock else None,
            )
    result.add("memory read", memory, "GB/s")
    result.add("weights read for a token", plan.shape.active_bytes / 1e6, "MB")
    looked = rounds.decode if plan.tokens else rounds.prompt
    delay = statistics.median(b.delay_s / b.wall_s for b in looked)
    result.add("waiting for a core", delay * 100, "% of wall time")
    if not plan.tokens:
        speed = statistics.median(b.cpu_rate if one else b.wall_rate for b in looked)
        result.add("multiplications and additions of ours", speed * plan.shape.operations / 1e9, "GOP/s")
    result.notes.append(
        f"ours: {choose(plan.isa)}, {_form(plan)}, precision {plan.precision}, all experts in memory, "
        f"prompts in steps of {plan.chunk}, telemetry on"
    )
    result.notes.append(f"floor: weights of a token over the fastest memory probe; {plan.rounds} rounds in turn")
    if peer:
        form = "bf16" if peer.name == "transformers" else "Q4_0"
        result.notes.append(f"{peer.name}: {peer.settings}, {form}, the same weights and tokens")
        if isinstance(plan.shape, Shape) and plan.shape.layers == 1:
            result.notes.append("one layer: llama.cpp is asked for all logits of a prompt, or it would leave out rows")
    _judge(rounds.memory, looked, rounds.peer_decode if plan.tokens else rounds.peer_prompt, result, one, delay)


def _judge(memory: list[float], ours: list[Block], peers: list[Block], result: Result, one: bool, delay: float) -> None:
    def rate(block: Block) -> float:
        return block.cpu_rate if one else block.wall_rate

    mine = [rate(b) for b in ours]
    if peers:
        ratios = [a / rate(b) for a, b in zip(mine, peers, strict=True)]
        if spread(ratios) > RATIO_SPREAD:
            result.reasons.append(f"the rounds' ratios differ by {spread(ratios):.0%} between their quartiles")
    elif spread(mine) > RATE_SPREAD:
        result.reasons.append(f"the rounds' speeds differ by {spread(mine):.0%} between their quartiles")
    if spread(memory) > RATE_SPREAD:
        result.reasons.append(f"memory speed differs by {spread(memory):.0%} between the quartiles of its probes")
    if not one and delay > DELAY_SHARE:
        result.reasons.append(f"threads waited for a core {delay:.0%} of the wall time")


def _agreement(plan: Plan, engine: Engine, peer: Peer, result: Result) -> None:
    """Are both computing the same model? Last logits of short prompts; ours and llama.cpp round activations to 8
    bits, bf16 rounds weights and activations to 8."""
    distances, same = [], 0
    prompts = _prompts(plan, 4)
    for prompt in (p[:16] for p in prompts):
        mine, theirs = engine.logits(prompt)[-1], peer.logits(prompt)
        distances.append(float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)))
        same += int(mine.argmax() == theirs.argmax())
    result.add("distance of the logits", statistics.median(distances) * 100, "% of their norm", peer=peer.name)
    result.add("same first choice", same, f"of {len(prompts)}", peer=peer.name)


def _form(plan: Plan) -> str:
    return f"{plan.shape.path}" if isinstance(plan.shape, ours.Given) else f"int4 in groups of {GROUP}"


def subject(shape: str, model: Path | None) -> Shape | ours.Given:
    """A model where one is given, else a shape."""
    return shape_named(shape) if model is None else ours.given(model)


def shape_named(name: str) -> Shape:
    """ValueError names the shapes that there are."""
    if name not in SHAPES:
        raise ValueError(f"--shape {name!r} is none of {', '.join(SHAPES)}")
    return SHAPES[name]
