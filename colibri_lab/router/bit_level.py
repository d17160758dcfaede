"""bit_level: sigmoid out of a 64 KiB fixed-point table, a threshold, one bit for each expert that reaches it, popcount.

A row is moved so that its largest logit is 4: there the sigmoid is steep and the table tells logits 1/1024 apart down
to 8 below the largest. The threshold starts where the k-th of E normal numbers would lie (Blom), is moved at most three
times, and when not exactly k bits are set then, the exact router decides (counted as fallback).

The threshold is an index of the table, which is the same as one among its values, as they rise. Rounding, table and
threshold are all monotone. So exactly k set bits are the k largest logits, and two logits that the
table cannot tell apart across the k-th place are either both in or both out, which ends in the fallback: the *set* is
never wrong. What is approximate is the weights, the sigmoid's odds s / (1 - s) = exp(x) in 16 bits: within 0.1 % for
experts within 4 of the largest logit, 5 % at 8 below it, 0 from 16 below it on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ops import route
from ..ops.types import NonFiniteLogits


class BitLevel:
    """The reference as a Router object; `router: bit_level` runs the same in the kernels."""

    def __init__(self, top_k: int, normalise: bool) -> None:
        self.top_k, self.normalise = top_k, normalise

    def select(self, layer: int, logits: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """logits [R, E] -> experts int32 [R, k], best first, weights float32 [R, k]. NonFiniteLogits as Softmax."""
        experts = np.empty((len(logits), self.top_k), np.int32)
        weights = np.empty((len(logits), self.top_k), np.float32)
        for r, row in enumerate(logits):
            try:
                choice = route.bit_level(row, self.top_k, self.normalise)
            except route.NotFinite:
                raise NonFiniteLogits(layer, r) from None
            experts[r], weights[r] = choice.experts, choice.weights
        return experts, weights
