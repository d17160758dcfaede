"""What dispatch costs: from a layer's chosen experts to units in the rings, without any model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench.harness import Block, interleave, measured, spread
from colibri_lab.bench.result import Result
from colibri_lab.dispatch.rings import Rings
from colibri_lab.dispatch.waves import Dispatcher
from colibri_lab.engine.pipeline import Unit

CLAIM = 0.3  # us a dispatch, as the design's first author has it
SPREAD = 0.2  # between the quartiles of the rounds


@dataclass(frozen=True)
class Plan:
    """Steps of these numbers of rows, through `layers` layers, each row with `top_k` of `experts` experts."""

    rows: tuple[int, ...] = (1, 8, 64)
    layers: int = 16
    experts: int = 32
    top_k: int = 4
    steps: int = 200
    rounds: int = 15


def run(plan: Plan) -> Result:
    """Microseconds for a token (a row through one layer), whole steps and steps in groups; nothing is copied."""
    result = Result("dispatch")
    for rows in plan.rows:
        routes = zipf_markov_routes(1, plan.experts, plan.top_k, plan.steps, rows)[0]
        chosen = routes.reshape(plan.steps, rows, plan.top_k).tolist()
        kinds = {"one group": None, "groups of 8": 16} if rows > 8 else {"one group": None}
        made = {name: (Dispatcher(plan.experts, plan.top_k), Rings[Unit](size, 0.5)) for name, size in kinds.items()}

        def turn(name: str, chosen: list[list[list[int]]] = chosen, made: dict = made) -> Callable[[], Block]:  # type: ignore[type-arg]
            return lambda: dispatch(plan, chosen, *made[name])

        turns = {name: turn(name) for name in kinds}
        interleave(2, turns)
        for name, blocks in interleave(plan.rounds, turns).items():
            times = [1e6 * block.cpu_s / block.work for block in blocks]
            title, (dispatcher, rings) = f"{rows} row{'s' * (rows > 1)}, {name}", made[name]
            result.add(f"{title}: dispatch", statistics.median(times), "us/token", limit=CLAIM, smaller_is_better=True)
            counted = rings.counters() | dispatcher.counters()
            result.add(f"{title}: copied", counted["bytes_copied"] / max(1, counted["rows"]), "bytes/token")
            result.add(f"{title}: largest ring fill", 100 * counted["ring_fill_share_most"], "% of a ring")
            result.add(f"{title}: stalls", counted["stalls"] / max(1, counted["units"]), "per unit")
            if spread(times) > SPREAD:
                result.reasons.append(f"{title}: rounds differ by {spread(times):.0%} between their quartiles")
    result.notes.append(
        f"a token: one row through one layer, top-{plan.top_k} of {plan.experts} experts; waves, unit, ring put and "
        f"taken; CPU time, median of {plan.rounds} rounds; limit: the claim of {CLAIM} us a dispatch"
    )
    return result


def dispatch(plan: Plan, chosen: list[list[list[int]]], dispatcher: Dispatcher, rings: Rings[Unit]) -> Block:
    """As the pipeline does it: the producer a unit ahead of the consumer where there are groups."""
    with measured(0) as block:
        for step in chosen:
            groups = rings.deal(len(step), False)
            for layer in range(plan.layers):
                for at, n in groups:
                    while rings.holds(at):
                        rings.take()
                    while rings.full(n):
                        rings.stalls += 1
                        rings.take()
                    unit = Unit(layer, at, n)
                    unit.waves = dispatcher.split(step[at : at + n], plan.experts)
                    rings.put(unit)
                if len(groups) == 1:
                    rings.take()
            rings.clear()
    block.work = len(chosen) * len(chosen[0]) * plan.layers
    return block
