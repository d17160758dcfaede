"""Layers at one go: what a backend offers that needs nobody between them, and what it leaves.

Shape legend as in types.py; N: RUN_ROWS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..events import NO_EXPERT
from .types import F32, I32, Backend

RUN_ROWS = 32  # of a step at most; kernels/cpu/types.h has the same


@dataclass
class Runs:
    """What the layers of a run leave, and what they are told."""

    experts: I32  # [L, N, k] chosen, best first; NO_EXPERT in a dense layer
    weights: F32  # [L, N, k] 0 in a dense layer
    kv_dst: I32  # [L, N] final pool index of each row's K/V
    reached: I32  # [1] a layer
    spent: NDArray[np.int64]  # [2] ns so far: attention with router, experts with grouping

    @classmethod
    def allocate(cls, layers: int, top_k: int) -> Runs:
        """Nothing chosen yet."""
        shape = layers, RUN_ROWS, max(top_k, 1)
        return cls(np.full(shape, NO_EXPERT, np.int32), np.zeros(shape, np.float32), np.zeros(shape[:2], np.int32),
                   np.zeros(1, np.int32), np.zeros(2, np.int64))  # fmt: skip


@runtime_checkable
class Running(Backend, Protocol):
    """A backend that can go from layer to layer by itself, with the bits of one call after the other."""

    runs: Runs  # there from `bind` on

    def run_layers(self, first: int, n: int) -> int:
        """attn_router and expert_ffn of rows [0, n), n at most RUN_ROWS, from layer `first` on: L, or the layer where
        an expert is not in memory, whose attn_router has run. `runs` has the choices of both and all before them.

        K/V are kept, also of the layer that is returned, where expert_ffn moves them as ever. Raises NonFiniteLogits.
        """

    def settle_layers(self, first: int, last: int, n: int) -> None:
        """K/V of the layers first <= l < last that were run go to runs.kv_dst[l, :n]."""
