"""Launches of the routers: kernels/cuda/router.cu and two_stage.cu. Shape legend as in types.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .launch import Kernels
from .layout import ceil_div
from .products import upload
from .routing import COUNTS, HIDDEN_BITS, Routing, gate_codes, sigmoid_table, threshold_guess
from .types import ModelWeights, Rows


@dataclass(frozen=True)
class Choice:
    """What a layer's router leaves on the device: experts int32 and weights float32 [n, k], best first; counts int32
    [n, len(COUNTS)]; span float32 [n, 2], smallest and largest finite logit; status int32 [n], see common.cuh."""

    experts: Any
    weights: Any
    counts: Any
    span: Any
    status: Any


class RouterLaunches:
    """Room for `capacity` rows, the gates, and what the bound kind of router needs beside them."""

    def __init__(self, kernels: Kernels, w: ModelWeights, capacity: int) -> None:
        self._kernels, self._w = kernels, w
        self.routing = w.routing or Routing.make(len(w.layers))
        d, r, e, k = kernels.device, capacity, max(w.experts, 1), max(w.top_k, 1)
        self._gates = {i: upload(d, m.gate) for i, m in enumerate(w.layers) if m.gate is not None}
        self._logits, self._exact = (d.empty((r, e), np.float32) for _ in range(2))
        self._experts, self._guess, self._right = (d.empty((r, k), np.int32) for _ in range(3))
        self._weights, self._span = d.empty((r, k), np.float32), d.empty((r, 2), np.float32)
        self._counts, self._unheard = d.empty((r, len(COUNTS)), np.int32), d.empty((r,), np.int32)
        self._all = upload(d, np.ones((r, e), np.uint8))
        self._normed = d.empty((r, w.hidden), np.float32)
        if self.routing.kind == "bit_level":
            self._sigmoid = upload(d, sigmoid_table())
        if self.routing.kind == "two_stage":
            codes = {i: gate_codes(m.gate, self.routing.bits) for i, m in enumerate(w.layers) if m.gate is not None}
            self._codes = {i: (upload(d, c.codes), upload(d, c.facts), c.codes.shape[1]) for i, c in codes.items()}
            width = max((c.codes.shape[1] for c in codes.values()), default=1)
            self._row_codes, self._row_facts = d.empty((r, width), np.int16), d.empty((r, 3), np.float64)
            self._bounds, self._hopeless = d.empty((r, 2, e), np.float32), d.empty((r,), np.int32)
            self._wanted = d.empty((r, e), np.uint8)

    def room(self, status: Any) -> Choice:
        """Where `choose` leaves what `read` reads."""
        return Choice(self._experts, self._weights, self._counts, self._span, status)

    def choose(self, layer: int, x: Any, n: int, to: Choice) -> None:
        """Logits, experts and weights of x [n, H]; the status says where they are not finite."""
        w, kind = self._w, self.routing.kind
        if kind == "two_stage":
            self._stage(layer, x, n, to)
        else:
            self._score(layer, x, n, self._all, self._logits)
        row = (self._logits, to.experts, to.weights, to.counts, to.span, to.status)
        sizes = (w.experts, w.top_k, int(w.normalise_top_k))
        if kind == "int8_lut":
            self._choice("route_int8_lut", n, 1, *row, *sizes, self.routing.bits)
        elif kind == "bit_level":
            self._choice("route_bit_level", n, 2, *row, self._sigmoid, *sizes, *threshold_guess(w.experts, w.top_k))
        else:
            self._choice("route_softmax", n, 1, *row, *sizes, int(kind == "two_stage"))
        if self.routing.audit:
            exact = self._logits
            if kind == "two_stage":
                exact = self._exact
                self._score(layer, x, n, self._all, exact)
            self._choice("audit_choice", n, 1, exact, to.experts, self._right, to.counts, *sizes[:2])

    def read(self, layer: int, rows: Rows, some: slice) -> None:
        """What `choose` found, into the host's rows and the layer's counters."""
        device, n = self._kernels.device, some.stop - some.start
        for target, source in ((rows.router_logits, self._logits), (rows.experts, self._experts),
                               (rows.weights, self._weights)):  # fmt: skip
            target[some] = device.read(source[:n])
        self.add(layer, device.read(self._counts[:n]), device.read(self._span[:n]))

    def add(self, layer: int, counts: np.ndarray[Any, Any], span: np.ndarray[Any, Any]) -> None:
        """Count some rows of a layer; counts and span as in Choice."""
        self.routing.add(layer, float(span[:, 0].min()), float(span[:, 1].max()),
                         **dict(zip(COUNTS, counts.sum(axis=0).tolist(), strict=True)))  # fmt: skip

    def guess(self, layer: int, x: Any, at: Any, norm: Any, n: int) -> Any:
        """[n, k] the experts that the gate picks from the hidden state before attention: x[at[:n]], normed."""
        w = self._w
        self._kernels("rms_norm", (n, 1, 1), 256, x, at, norm, self._normed, w.hidden, w.norm_eps, shared=32)
        self._score(layer, self._normed, n, self._all, self._logits)
        self._choice("route_softmax", n, 1, self._logits, self._guess, self._weights, self._counts, self._span,
                     self._unheard, w.experts, w.top_k, int(w.normalise_top_k), 0)  # fmt: skip
        return self._guess

    def guesses(self, n: int) -> np.ndarray[Any, Any]:
        """int32 [n, k] on the host, of the last call of `guess`."""
        return self._kernels.device.read(self._guess[:n])

    def _stage(self, layer: int, x: Any, n: int, to: Choice) -> None:
        """Logits of the candidates alone, -inf for the others, where the certificate holds."""
        w, (codes, facts, width) = self._w, self._codes[layer]
        bits = min(self.routing.bits, HIDDEN_BITS)
        self._kernels("row_codes", (n, 1, 1), 32, x, self._row_codes, self._row_facts, self._hopeless, w.hidden, width,
                      bits)  # fmt: skip
        self._kernels("code_bounds", (ceil_div(w.experts, 4), n, 1), 128, codes, facts, self._row_codes,
                      self._row_facts, self._bounds, self._hopeless, w.experts, w.hidden, width)  # fmt: skip
        self._choice("choose_candidates", n, 1, self._bounds, self._hopeless, self._wanted, self._right, to.counts,
                     w.experts, w.top_k, int(w.normalise_top_k))  # fmt: skip
        self._score(layer, x, n, self._wanted, self._logits)

    def _score(self, layer: int, x: Any, n: int, wanted: Any, logits: Any) -> None:
        self._kernels("router_logits", (ceil_div(self._w.experts, 4), n, 1), 128, self._gates[layer], x, wanted, logits,
                      self._w.experts, self._w.hidden)  # fmt: skip

    def _choice(self, name: str, n: int, words: int, *arguments: Any) -> None:
        """One warp a row, with `words` ints of shared memory an expert."""
        self._kernels(name, (n, 1, 1), 32, *arguments, shared=4 * words * self._w.experts)
