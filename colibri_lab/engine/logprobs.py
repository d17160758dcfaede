"""What a step's tokens were chosen from: the most probable ones, for telemetry (`telemetry_top_logprobs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops.types import Rows
from .sampling import largest, log_probability
from .sequence import Work


class Logprobs:
    """decode: ids to text, so that a trace reads without the tokenizer."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode

    def tell(self, telemetry: Any, most: int, works: Sequence[Work], tokens: Sequence[tuple[int, float] | None],
             rows: Rows) -> None:  # fmt: skip
        """tokens: (id, logprob) of the works that end in one, chosen from rows.logits in this order."""
        row = 0
        for work, token in zip(works, tokens, strict=True):
            if token is None:
                continue
            id, logprob = token
            if logprob == logprob:  # else the request ends with an error
                best = self.best(rows.logits[row], float(rows.logsumexp[row]), most)
                position = work.start + work.count
                telemetry.logprobs(work.sequence.number, position, (id, self._decode([id]), logprob), best)
            row += 1

    def best(self, logits: NDArray[np.float32], logsumexp: float, most: int) -> list[tuple[int, str, float]]:
        """(id, text, natural log of its probability) of the most probable tokens, best first; ties to the lower id."""
        ids = largest(logits.astype(np.float64), min(most, len(logits)))
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        return [(int(id), self._decode([int(id)]), log_probability(logits, int(id), logsumexp)) for id in ids]
