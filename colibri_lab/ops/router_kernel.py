"""The C router alone, without a model around it: for tests against the reference, and for timing."""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import abi
from .cpu import open_library
from .routing import F32, MOST_EXPERTS, Routing
from .types import NonFiniteLogits

FIRST_STAGE = 2  # colibri_route's `score`: see kernels/cpu/route.c


class RouterKernel:
    """One bound router for at most `rows` rows of `experts` logits; one thread.

    gate [E, H]: needed by two_stage and by `score`. isa None: the best level. Fill `.logits` or `.x`, call `run`, read
    `.experts` int32 [rows, k] and `.weights` float32 [rows, k]; counters are in `routing`.
    """

    def __init__(self, routing: Routing, experts: int, top_k: int, normalise: bool, rows: int,
                 gate: F32 | None = None, isa: str | None = None) -> None:  # fmt: skip
        if not 1 <= top_k <= experts <= MOST_EXPERTS:
            raise ValueError(f"k {top_k} must be from 1 to the {experts} experts, and these at most {MOST_EXPERTS}")
        if gate is None and routing.kind == "two_stage":
            raise ValueError("two_stage needs a gate")
        hidden = 0 if gate is None else gate.shape[1]
        self.routing, self.isa = routing, isa
        self.gate = None if gate is None else np.ascontiguousarray(gate, np.float32)
        self.logits: F32 = np.zeros((rows, experts), np.float32)
        self.x: F32 = np.zeros((rows, max(hidden, 1)), np.float32)
        self.experts: NDArray[np.int32] = np.zeros((rows, top_k), np.int32)
        self.weights: F32 = np.zeros((rows, top_k), np.float32)
        self.isa, library = open_library(isa)
        self._call = library.colibri_route
        self._layers = (abi.Layer * 1)()
        self._keep: list[Any] = []
        m = self._model = abi.Model(hidden=hidden, experts=experts, top_k=top_k, normalise=normalise)
        abi.bind_routing(m, self._layers, [self.gate], routing, experts, top_k, self._keep)
        self._layers[0].gate = None if self.gate is None else self.gate.ctypes.data
        m.ffn_in, m.router_logits = self.x.ctypes.data, self.logits.ctypes.data
        m.experts_of_row, m.weights = self.experts.ctypes.data, self.weights.ctypes.data
        self._at = c.byref(m), c.byref(self._layers[0])

    def first_stage(self, n: int) -> None:
        """The first stage of two_stage alone, of the first n rows of `.x`: `.experts` has its ids, see types.Staged."""
        if self.routing.kind != "two_stage":
            raise ValueError(f"{self.routing.kind} has no first stage")
        self._run(n, FIRST_STAGE)

    def run(self, n: int | None = None, score: bool = False) -> None:
        """Route the first n rows (None: all); score: make the logits from `.x` first. NonFiniteLogits names the row."""
        if score and self.gate is None:
            raise ValueError("scoring needs a gate")
        self._run(len(self.logits) if n is None else n, int(score))

    def _run(self, n: int, score: int) -> None:
        if not 0 <= n <= len(self.logits):
            raise ValueError(f"there is room for {len(self.logits)} rows, not {n}")
        done = self._call(*self._at, n, score)
        if done < 0:
            raise MemoryError("no memory for a row's codes")
        if done < n:
            raise NonFiniteLogits(0, int(done))
