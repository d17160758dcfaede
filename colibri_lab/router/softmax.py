"""The exact router: softmax over all experts, then the k largest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ops.types import NonFiniteLogits


class Softmax:
    """float64 softmax over all experts, top-k of it, optionally divided by the chosen ones' sum.

    Selection looks at the float32 logits themselves: equal logits are ties and nothing else is; the lower index wins.
    """

    def __init__(self, top_k: int, normalise: bool) -> None:
        self.top_k, self.normalise = top_k, normalise

    def select(self, layer: int, logits: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """logits [R, E] -> experts int32 [R, k], best first, and their weights float32 [R, k].

        -inf is allowed for some experts; NaN, +inf, or -inf for all raise NonFiniteLogits.
        """
        bad = np.isnan(logits).any(axis=1) | ~np.isfinite(logits.max(axis=1))
        if bad.any():
            raise NonFiniteLogits(layer, int(bad.argmax()))
        experts = np.argsort(-logits, axis=1, kind="stable")[:, : self.top_k]
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        exponents = np.exp(shifted)
        chosen = np.take_along_axis(exponents, experts, axis=1)
        total = chosen.sum(axis=1, keepdims=True) if self.normalise else exponents.sum(axis=1, keepdims=True)
        return experts.astype(np.int32), (chosen / total).astype(np.float32)
