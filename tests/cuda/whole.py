"""Small random models whose decode steps go at one go, beside the same steps layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.device import Device
from colibri_lab.ops.routing import Routing
from tests.ops.models import Bound, Shape, make

Steps = list[list[tuple[int, int]]]


class WholeBound(Bound):
    """`step_whole` is `step` at one go; all experts are brought first."""

    def bring(self) -> None:
        for layer in range(self.shape.layers):
            if layer not in self.shape.dense:
                self.backend.tier.bring(layer, range(self.shape.experts))
        self.backend.tier.arrived()

    def step_whole(self, tokens: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
        rows, n = self.rows, len(tokens)
        for r, (seat, token) in enumerate(tokens):
            rows.seat[r], rows.token[r], rows.position[r] = seat, token, self.next[seat]
            self.next[seat] += 1
        self.backend.run_whole(n)
        whole = self.backend.whole
        for layer in range(self.shape.layers):
            whole.target[layer, :n] = [self.free.pop() for _ in range(n)]
        whole.settle()
        rows.out_row[:n] = np.arange(n)
        self.backend.head(n)
        return rows.logits[:n].copy()


def pair(shape: Shape, device: Device, other: Device, precision: str = "exact", kind: str = "softmax",
         seed: int = 7) -> tuple[WholeBound, WholeBound]:  # fmt: skip
    """The same model twice, with counters of its own each."""
    weights, pages = make(shape, seed, poison=0xFF)
    made = []
    for one in (device, other):
        routing = Routing.make(shape.layers, kind, 9, audit=True)
        model = (replace(weights, routing=routing), pages)
        made.append(WholeBound(CudaBackend(one, precision), shape, model=model, shuffle=3))
    return made[0], made[1]


def compare(whole: WholeBound, layers: WholeBound, steps: Steps, texts: Steps) -> None:
    """texts: what comes before, layer by layer in both. Bits, choices, tables and counters agree after each step."""
    for text in texts:
        assert np.array_equal(whole.step(text), layers.step(text))
    whole.bring()
    for step in steps:
        got, want, n = whole.step_whole(step), layers.step(step), len(step)
        assert np.array_equal(got, want), step
        for name in ("argmax", "logsumexp"):
            assert np.array_equal(getattr(whole.rows, name)[:n], getattr(layers.rows, name)[:n])
        last = whole.shape.layers - 1
        if last not in whole.shape.dense:
            experts, weights = whole.backend.whole.chosen(last)
            assert np.array_equal(experts, layers.rows.experts[:n])
            assert np.array_equal(weights, layers.rows.weights[:n])
        seats = sorted({seat for seat, _ in step})
        for seat in seats:
            past = whole.next[seat]
            assert np.array_equal(whole.kv.first[seat, :, :past], layers.kv.first[seat, :, :past])
            placed = whole.kv.where[seat, :, :past]
            assert ((placed >= 0) & (placed < whole.kv.staging)).all(), "a token has no place"
    assert np.array_equal(whole.kv.seen, layers.kv.seen)
    got, want = whole.weights.routing, layers.weights.routing
    assert np.array_equal(got.counts, want.counts) and np.array_equal(got.span, want.span)
