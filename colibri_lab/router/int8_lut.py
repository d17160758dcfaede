"""int8_lut: logits as 8 to 16 bit codes between a row's smallest and largest, softmax out of a table. Approximate.

Two logits nearer than a step, (largest - smallest) / (2 ** bits - 1), may get one code, and then the lower index wins:
a wrong selection when they lie across the k-th place. The table has exp(-d * step) for each distance d of a code from
the top one; it depends on the row's step, so it is made for every row, as the outer product of tables of sixteen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ops import route
from ..ops.types import NonFiniteLogits


class Int8Lut:
    """The reference as a Router object; `router: int8_lut` runs the same in the kernels."""

    def __init__(self, top_k: int, normalise: bool, bits: int = 8) -> None:
        self.top_k, self.normalise, self.bits = top_k, normalise, bits

    def select(self, layer: int, logits: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """logits [R, E] -> experts int32 [R, k], best first, weights float32 [R, k]. NonFiniteLogits as Softmax."""
        experts = np.empty((len(logits), self.top_k), np.int32)
        weights = np.empty((len(logits), self.top_k), np.float32)
        for r, row in enumerate(logits):
            try:
                choice = route.int8_lut(row, self.top_k, self.normalise, self.bits)
            except route.NotFinite:
                raise NonFiniteLogits(layer, r) from None
            experts[r], weights[r] = choice.experts, choice.weights
        return experts, weights
