"""What will be needed soon: `neighbour`, `history`, `next_gate`, `second_gate`, combinations, your own by a protocol.

Shapes: n rows of the step, k experts a row, E experts a layer, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..ops.types import ModelWeights, Rows
from .policies import policy_name

Guess = tuple[int, Sequence[int]]  # (layer, its experts, most wanted first)


class Prefetcher(Protocol):
    """Asked once for each sparse layer of a step, when its experts are in memory and before they compute."""

    def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Guess:
        """chosen: the experts of each row [n][k] in `layer`; missing: those that were not in memory. What to read
        ahead is a layer and experts of it; those in memory already, and those beyond the limit, are left out."""


class Neighbour:
    """After a miss, the experts that lie beside it in the file: same layer, same page offsets, nearest first."""

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Guess:
        near: dict[int, None] = {}
        for distance in range(1, self._experts if missing else 0):
            for expert in missing:
                near |= dict.fromkeys((expert + distance, expert - distance))
        return layer, [e for e in near if 0 <= e < self._experts and e not in missing]


class History:
    """What followed this expert before: counts how often rows went from an expert of one layer to one of the next.

    After the last sparse layer comes the first, of the next token.
    """

    def __init__(self, sparse: Sequence[bool], experts: int, top_k: int) -> None:
        order = [layer for layer, s in enumerate(sparse) if s]
        self._next = dict(zip(order, order[1:] + order[:1], strict=True))
        self._counts = {layer: np.zeros((experts, experts), np.int64) for layer in order}  # [from, to]
        self._top_k = top_k
        self._before: tuple[int, NDArray[np.int64]] | None = None  # (layer, chosen [n, k]) of the last call

    def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Guess:
        now = np.array(chosen)  # [n, k]
        target, n = self._next[layer], len(now)
        if self._before is not None:
            last, then = self._before
            if self._next[last] == layer and len(then) == n:
                np.add.at(self._counts[last], (then[:, :, None], now[:, None, :]), 1)  # row by row
        self._before = layer, now
        scores = self._counts[layer][now.ravel()].sum(axis=0)  # [E]
        best = np.argsort(-scores, kind="stable")[: n * self._top_k]
        return target, [e for e in best.tolist() if scores[e] > 0]


class NextGate:
    """The gate of a layer ahead applied to this layer's hidden state: nearly what that router will be given.

    ahead: how many sparse layers; the farther, the less the gate knows. The hidden state is the residual stream after
    attention. Where the model has a shared expert, whose output every row gets, the guess waits for the layer's end
    (`after_experts`) and so includes it. The layer's norm weight is folded into its gate; the norm's own factor changes
    no order, so it is left out.
    """

    def __init__(self, rows: Rows, weights: ModelWeights, ahead: int = 1) -> None:
        self._rows, self._top_k = rows, weights.top_k
        self.after_experts = any(layer.shared is not None for layer in weights.layers)
        self._gates: dict[int, tuple[int, NDArray[np.float32]]] = {}  # layer -> (the one ahead, its gate [E, H])
        order = [i for i, layer in enumerate(weights.layers) if layer.gate is not None]
        for here, after in zip(order, order[ahead:], strict=False):
            layer = weights.layers[after]
            assert layer.gate is not None
            self._gates[here] = after, np.ascontiguousarray(layer.gate * layer.post_norm)

    def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Guess:
        if layer not in self._gates:
            return layer, ()
        target, gate = self._gates[layer]
        n, k = len(chosen), self._top_k
        if n == 1:
            row = gate @ self._rows.x[0]  # [E]
            return target, row.argsort()[: -k - 1 : -1].tolist()
        scores = self._rows.x[:n] @ gate.T  # [n, E]
        best = np.argpartition(scores, -k, axis=1)[:, -k:]  # [n, k]
        votes = np.bincount(best.ravel(), minlength=len(gate))  # rows that will want it
        return target, [e for e in np.argsort(-votes, kind="stable").tolist() if votes[e]]


def make_prefetchers(chosen: str | Prefetcher | None, rows: Rows, weights: ModelWeights) -> dict[str, Prefetcher]:
    """The prefetchers of `chosen` by name, most trusted first: "next_gate+history" are two, "none" and None none."""
    if not isinstance(chosen, str):
        return {} if chosen is None else {policy_name(chosen): chosen}
    sparse = [layer.gate is not None for layer in weights.layers]
    make: dict[str, Callable[[], Prefetcher]] = {
        "neighbour": lambda: Neighbour(weights.experts),
        "history": lambda: History(sparse, weights.experts, weights.top_k),
        "next_gate": lambda: NextGate(rows, weights),
        "second_gate": lambda: NextGate(rows, weights, 2),
    }
    return {name: make[name]() for name in chosen.split("+") if name != "none"}
