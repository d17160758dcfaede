"""From recorded routes to what the pager was asked for, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from colibri_lab.dispatch.waves import Dispatcher
from colibri_lab.events import NO_EXPERT, Phase


@dataclass(frozen=True)
class Accesses:
    """`steps` holds, for each step of the engine, (layer, experts chosen by each row [n][k]) of its sparse layers.

    `decode` says of each step whether all its rows decoded.
    """

    experts: int
    top_k: int
    steps: Sequence[Sequence[tuple[int, list[list[int]]]]]
    decode: Sequence[bool] = ()

    @property
    def keys(self) -> int:
        """Different experts that were asked for."""
        return len({layer * self.experts + e for layer, wanted in self.waves(1 << 30) for e in wanted})

    @property
    def references(self) -> int:
        """Experts asked for in all, each once a layer and step: hits and faults together."""
        return sum(len(wanted) for _, wanted in self.waves(1 << 30))

    def waves(self, room: int) -> Iterator[tuple[int, Sequence[int]]]:
        """(layer, experts) of every `Pager.acquire`, in order, where at most `room` experts fit at once."""
        split = Dispatcher(self.experts, self.top_k).split
        for step in self.steps:
            for layer, chosen in step:
                for _, _, wanted in split(chosen, room):
                    yield layer, wanted


def accesses(tokens: Any, route: Any, experts: int) -> Accesses:
    """From a recording's token rows (events.TOKEN) and routes uint16 [rows, L, k]; rows of a step end together."""
    route = np.asarray(route)
    ends = np.asarray(tokens["t_ns"])
    edges = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ends)]
    steps = []
    for first, last in pairwise(edges):
        rows = route[first:last]
        layers = [layer for layer in range(route.shape[1]) if last > first and rows[0, layer, 0] != NO_EXPERT]
        steps.append([(layer, rows[:, layer].tolist()) for layer in layers])
    prompt = np.asarray(tokens["phase"]) == Phase.PREFILL
    decode = [not prompt[first:last].any() for first, last in pairwise(edges)]
    return Accesses(experts, route.shape[2], steps, decode)


def recorded(source: Any) -> Accesses:
    """All that a Telemetry, a ReplaySource or an engine still holds; ValueError when the beginning is gone already."""
    source = getattr(source, "telemetry", source)
    cursor = source.cursor()
    gone = cursor.at["tokens"]  # rows that were overwritten before anybody looked
    batch = source.read(cursor)
    if gone or batch.missing:
        raise ValueError("the recording has gaps: what was in memory then is not known")
    return accesses(batch.tokens, batch.route, source.experts)
