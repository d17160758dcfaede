"""What the board costs: CPU time and bytes of an update, and decode with it and without it, in a real kernel."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from colibri_lab.bench.frontend import Frontend
from colibri_lab.bench.harness import Block, interleave, percentile
from colibri_lab.bench.pages import TAKEN_NS, touch_ns
from colibri_lab.bench.result import Result

UPDATE_MS, UPDATE_BYTES, SLOWER = 1.5, 12_000, 3.0  # bars: of one update, and per cent of decode
CONTROL = 1.0  # per cent by which two sides without a board may differ
PACE = 10  # steps a second of the slow run: four requests, so 40 tokens
CHILD = "from colibri_lab.bench.dashboard_child import Bench\nprint('{}')"


@dataclass(frozen=True)
class Plan:
    """What to run. shape: of decode, for `block` s in a round; seconds: for which updates of `wide` are looked at;
    pictures: updates one after the other."""

    shape: str = "m1"
    rounds: int = 12
    block: float = 1.5
    seconds: float = 8.0
    threads: int = 1
    hz: float = 8.0
    wide: str = "wide"
    pictures: int = 80


def run(plan: Plan) -> Result:
    """Both measurements, each in a kernel of its own with a front end that receives."""
    result = Result(f"dashboard {plan.shape}, {plan.hz:g} Hz")
    with Frontend() as page:
        page.run(CHILD)
        _costs(plan, page, result)
    with Frontend() as page:
        page.run(CHILD)
        _slower(plan, page, result)
    result.notes.append(
        "an update: events folded, frame built, serialised, signed and sent by ipykernel, received and parsed by a "
        "front end in another process; a browser's drawing is not in it"
    )
    return result


def _costs(plan: Plan, page: Frontend, result: Result) -> None:
    about = page.run(f"bench = Bench('{plan.wide}', {plan.threads}, {plan.hz}, True)")
    model = f"{about['layers']} x {about['experts']}, top-{about['top_k']}"
    for name, options in (("slow", f"pace={PACE}"), ("fast", ""), ("what-if open", f"pace={PACE}, watch=True")):
        page.boards.clear()
        cost = page.run(f"bench.costs({plan.seconds}, {options})")
        (board,) = page.boards.values()
        each = {part: 1000 * s / max(cost["updates"], 1) for part, s in cost["cpu_s"].items()}
        what = f"{name}: an update at {cost['tokens_per_s']:.0f} tokens/s ({model})"
        result.add(what, sum(each.values()), "ms of CPU", limit=UPDATE_MS)
        result.add(what, board.bytes / max(board.frames, 1), "bytes", limit=UPDATE_BYTES)
        parts = ", ".join(f"{part} {ms:.2f} ms" for part, ms in each.items())
        rate = cost["updates"] / cost["seconds"]
        result.notes.append(f"{name}: {rate:.1f} updates/s, {board.frames} frames arrived; {parts}")
        if rate < 0.8 * plan.hz:
            result.reasons.append(f"{name}: {rate:.1f} updates a second where {plan.hz:g} were asked for")
    _one_after_the_other(plan, page, result, model)
    back = page.run(f"bench.travel({plan.seconds})")
    for what in ("step", "jump"):
        result.add(f"a {what} on the time line ({model})", statistics.median(back[f"{what}_ms"]), "ms of CPU")
    result.notes.append(f"time line: {back['tokens']} tokens are kept; the first look takes {back['first_ms']:.0f} ms")
    page.run("bench.close()")


def _one_after_the_other(plan: Plan, page: Frontend, result: Result, model: str) -> None:
    """The work itself: all that it touches is in reach of the processor."""
    page.run(f"bench.engine.settings.pace = {PACE}\nprint('{{}}')")
    cost = page.run(f"bench.replayed(0, {plan.pictures})")
    each = {part: 1000 * s / max(cost["updates"], 1) for part, s in cost["cpu_s"].items()}
    result.add(f"one after the other: an update ({model})", sum(each.values()), "ms of CPU", limit=UPDATE_MS)
    parts = ", ".join(f"{part} {ms:.2f} ms" for part, ms in each.items())
    result.notes.append(
        f"one after the other: {cost['updates']} updates, {cost['events'] / max(cost['updates'], 1):.0f} events each, "
        f"of {4 * PACE} tokens/s as recorded; {parts}"
    )
    cost = page.run(f"bench.replayed({1 / plan.hz}, {plan.pictures})")
    rested = 1000 * sum(cost["cpu_s"].values()) / max(cost["updates"], 1)
    result.add(f"after {1000 / plan.hz:.0f} ms of nothing: the same update ({model})", rested, "ms of CPU")
    result.notes.append(
        f"the same updates cost {rested / sum(each.values()):.1f} times as much where this process rested before each, "
        "with no engine beside them: what is lost of the processor's caches meanwhile, to whoever else is on it"
    )
    later, again = touch_ns(1 / plan.hz)
    result.add(f"a page of memory after {1000 / plan.hz:.0f} ms", later, "ns", limit=TAKEN_NS)
    result.notes.append(f"a page touched again at once takes {again:.0f} ns")
    if later > TAKEN_NS:
        result.reasons.append(
            f"this machine takes memory away that rests: a page takes {later / 1000:.1f} us after "
            f"{1000 / plan.hz:.0f} ms, so an update beside an engine costs far more than its work"
        )


def _slower(plan: Plan, page: Frontend, result: Result) -> None:
    page.run(f"bench = Bench('{plan.shape}', {plan.threads}, {plan.hz}, False)")
    told: list[dict[str, Any]] = []

    def side(board: bool) -> Block:
        said = page.run(f"bench.block({board}, {plan.block})")
        told.extend([said] if board else [])
        return Block(*(said[name] for name in ("work", "wall_s", "cpu_s", "delay_s")))

    sides = {"off": lambda: side(False), "on": lambda: side(True), "control": lambda: side(False)}
    interleave(1, sides)
    told.clear()
    blocks = interleave(plan.rounds, sides)
    page.run("bench.close()")
    rounds = list(zip(*(blocks[name] for name in sides), strict=True))
    slower = [100 * (2 * on.wall_s / (off.wall_s + control.wall_s) - 1) for off, on, control in rounds]
    noise = [100 * (control.wall_s / off.wall_s - 1) for off, _, control in rounds]
    speed = {name: statistics.median(block.wall_rate for block in found) for name, found in blocks.items()}
    without = (speed["off"] + speed["control"]) / 2
    result.add("decode with the board", speed["on"], "tokens/s", peer="without", peer_value=without)
    cost = statistics.median(slower)
    result.add("decode is slower by", max(cost, 0.0), "%", limit=SLOWER)
    updates = sum(said["updates"] for said in told)
    took = 1000 * sum(said["board_cpu_s"] for said in told) / max(updates, 1)
    result.add(f"an update while {plan.shape} decodes", took, "ms of CPU", limit=UPDATE_MS)
    result.add("control: without against without", abs(statistics.median(noise)), "%", limit=CONTROL)
    low, high = percentile(slower, 0.25), percentile(slower, 0.75)
    result.notes.append(f"quartiles of the rounds: {low:.1f} to {high:.1f} % slower; {updates} updates were in it")
    if abs(statistics.median(noise)) > CONTROL:
        result.reasons.append(f"two sides without a board differ by {statistics.median(noise):.1f} %")
    if high - low > 2 * SLOWER:
        result.reasons.append(f"the rounds' costs lie {high - low:.1f} points apart between their quartiles")
