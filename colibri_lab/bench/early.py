"""What reads that begin between the stages of `two_stage` are worth: prompts on random weights, experts missing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from time import perf_counter_ns as clock

import numpy as np

from colibri_lab.bench.harness import Block, interleave, measured, spread
from colibri_lab.bench.ours import make_model
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.pager.ahead import Ahead
from colibri_lab.pager.transfer import Flight

SHAPE = Shape("early", 1024, 4, 64, 8, 512, 16, 4, 64, vocab=4096, positions=1024)  # 0.9 MiB an expert, 230 MB
APART = 100.0  # see ours.make_model: a prompt's rows use nearly all experts
NEVER = 1 << 30  # rows
NOISE = 0.3  # of the rounds, between their quartiles
SIDES = {"without": False, "early": True}


def run(result: Result, rounds: int, rows: int = 256, decoded: int = 8, budgets: tuple[int, ...] = (50, 90)) -> None:
    """Rows of `rounds` prompts of `rows` tokens a step, each the same with and without, and of tokens one by one.

    RuntimeError where a token differs.
    """
    path = make_model(SHAPE, 0, APART)
    for mode in ("sync", "async"):
        for share in budgets:
            with ExitStack() as stack:
                turns: dict[str, _Turn] = {}
                for side, early in SIDES.items():
                    engine = stack.enter_context(
                        Engine.load(path, router="two_stage", prefetcher=Silent(), engine_mode=mode,
                                    max_batch_size=1, prefill_chunk=rows, telemetry=False, pin_after_tokens=None)
                    )  # fmt: skip
                    engine.settings.expert_cache_bytes = engine.describe()["experts_total_bytes"] * share // 100
                    turns[side] = _Turn(engine, rows, decoded, early)
                _say(result, f"{rows} rows, 64 experts, {share} % in memory, {mode}", turns, rounds)


class Silent:
    """A prefetcher that has frames for guesses and makes none, so that early reads are all that is measured."""

    def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> tuple[int, Sequence[int]]:
        return layer, ()


class _Turn:
    """A prompt of its own each time, then tokens: what they took and waited, and by how much reads were early."""

    def __init__(self, engine: Engine, rows: int, decoded: int, early: bool) -> None:
        self.engine, self._rows, self._decoded = engine, rows, decoded
        self._dice = np.random.default_rng(4)
        self.wait_ms: list[float] = []
        self.token_ms: list[float] = []
        self.said: list[list[int]] = []
        between = engine._parts.early
        assert between is not None
        if not early:
            between.least_rows = NEVER
        self.lead_ns = _leads(engine._parts.pager.ahead)

    def __call__(self) -> Block:
        prompt = self._dice.integers(3, SHAPE.vocab, self._rows).tolist()
        stream = self.engine.generate(prompt, max_tokens=self._decoded + 1)
        waited = self.pager["io_wait_s"]
        with measured(1) as block:
            ids = [next(stream).id]
        self.wait_ms.append(1e3 * (self.pager["io_wait_s"] - waited))
        with measured(self._decoded) as rest:
            ids += [token.id for token in stream]
        self.token_ms.append(1e3 * rest.wall_s / self._decoded)
        self.said.append(ids)
        return block

    @property
    def pager(self) -> dict[str, float]:
        return dict(self.engine.counters()["pager"])


def _leads(ahead: Ahead) -> list[int]:
    """Filled from now on: of each early read, the nanoseconds from its beginning until the expert is asked for."""
    begun: dict[int, int] = {}
    found: list[int] = []
    issue, take = ahead.issue, ahead.take

    def issued(key: int, layer: int, expert: int, early: bool = False, keep: Container[int] = ()) -> bool:
        if early:
            begun[key] = clock()
        return issue(key, layer, expert, early, keep)

    def taken(key: int) -> tuple[Flight | None, bool]:
        flight, hit = take(key)
        if flight is not None and flight.early:
            found.append(clock() - begun[key])
        return flight, hit

    ahead.issue, ahead.take = issued, taken  # type: ignore[method-assign]
    return found


def _say(result: Result, name: str, turns: dict[str, _Turn], rounds: int) -> None:
    sides: dict[str, Callable[[], Block]] = dict(turns)
    blocks = {side: found[1:] for side, found in interleave(rounds + 1, sides).items()}  # the first fills the cache
    without, early = turns.values()
    if without.said != early.said:
        raise RuntimeError(f"{name}: reads ahead changed a token")
    took = {side: [1e3 * block.wall_s for block in found] for side, found in blocks.items()}
    waits = {side: turn.wait_ms[1:] for side, turn in turns.items()}
    tokens = {side: turn.token_ms[1:] for side, turn in turns.items()}
    for what, found in (("I/O wait", waits), ("a prompt", took), ("then a token", tokens)):
        plain, value = (statistics.median(values) for values in found.values())
        peer = {"peer": "without", "peer_value": plain} if value else {}  # async may hide all of a wait
        result.add(f"{name}: {what}", value, "ms", smaller_is_better=True, **peer)  # type: ignore[arg-type]
        gains = [a - b for a, b in zip(*found.values(), strict=True)]
        low, middle, high = statistics.quantiles(gains, n=4, method="inclusive")
        result.add(f"{name}: {what}, less than without, prompt by prompt", middle, "ms")
        result.add(f"{name}: {what}, lower quartile of that", low, "ms")
        result.add(f"{name}: {what}, upper quartile of that", high, "ms")
    for what in ("issued", "hits", "useful", "wasted", "cancelled"):
        result.add(f"{name}: {what}", early.pager[f"early_{what}"] / (rounds + 1), "experts a prompt")
    if early.lead_ns:
        result.add(f"{name}: a read begins earlier by", statistics.median(early.lead_ns) / 1e6, "ms")
    for side, values in took.items():
        if spread(values) > NOISE:
            result.reasons.append(f"{name}, {side}: rounds differ by {spread(values):.0%}")
