"""From logits to one token id, by rules that depend on nothing but the request and its own logits.

Order: repetition penalty, temperature, top-k, top-p, min-p, draw. Ties go to the lower id everywhere.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How tokens of a request are chosen.

    temperature 0: the most probable token. top_k 0, or past the vocabulary: all. top_p: the fewest most probable
    tokens whose sum reaches this probability, at least one (so 0 is greedy), 1: all. min_p: at least this share of the
    most probable token's probability. repetition_penalty: logits of tokens already seen are divided by it (multiplied
    where negative). seed: the request's own generator; the same seed gives the same tokens whatever else runs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 1e6),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1e-3, 1e3),
        ):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float, np.integer, np.floating))
                or not low <= value <= high
            ):
                raise RequestError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
        if (top_k := whole(self.top_k)) is None or top_k < 0:
            raise RequestError(f"top_k must be a whole number from 0 (all), not {self.top_k!r}")
        if self.seed is not None and whole(self.seed) is None:
            raise RequestError(f"seed must be a whole number or None, not {self.seed!r}")


def whole(value: Any) -> int | None:
    """A whole number as int, NumPy's too; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


class Sampler:
    """One request's chooser: its random generator and the tokens that it has seen."""

    def __init__(self, sampling: Sampling, seen: Iterable[int]) -> None:
        self._random = random.Random(whole(sampling.seed))
        self._seen = dict.fromkeys(seen) if sampling.repetition_penalty != 1.0 else None
        self.how = sampling
        self.plain = sampling.temperature == 0 and self._seen is None  # the backend's argmax is the answer

    @property
    def seen(self) -> list[int] | None:
        """Tokens that are penalised; None where none is."""
        return None if self._seen is None else list(self._seen)

    def number(self) -> float:
        """The next random number, from 0 to below 1; 0 where nothing is drawn."""
        return 0.0 if self.how.temperature == 0 else self._random.random()

    def saw(self, id: int) -> None:
        """Somebody else chose a token by these rules."""
        if self._seen is not None:
            self._seen[id] = None

    def choose(self, logits: NDArray[np.float32], number: float | None = None) -> int:
        """logits [V] (not changed) -> token id. number: one that `number` gave; None: the next."""
        how = self.how
        scores = logits.astype(np.float64)
        if self._seen is not None:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            old = scores[ids]
            scores[ids] = np.where(old > 0, old / how.repetition_penalty, old * how.repetition_penalty)
        if how.temperature == 0:
            chosen = int(scores.argmax())
        else:
            chosen = self._draw(scores, self.number() if number is None else number)
        self.saw(chosen)
        return chosen

    def _draw(self, scores: NDArray[np.float64], number: float) -> int:
        how, ids = self.how, None
        if 0 < how.top_k < len(scores):
            ids = largest(scores, how.top_k)
            scores = scores[ids]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            powers = np.exp((scores - scores.max()) / how.temperature)
        if how.top_p < 1 or how.min_p > 0:
            order = np.argsort(-powers, kind="stable")
            ranked = powers[order]
            before = np.concatenate(([0.0], np.cumsum(ranked)[:-1]))  # mass of the more probable ones
            keep = max(1, int(np.count_nonzero(before < how.top_p * powers.sum())))
            keep = min(keep, max(1, int(np.count_nonzero(ranked >= how.min_p * ranked[0]))))
            kept = np.sort(order[:keep])
            powers = powers[kept]
            ids = kept if ids is None else ids[kept]
        mass = np.cumsum(powers)
        at = min(int(np.searchsorted(mass, number * mass[-1], side="right")), len(mass) - 1)
        return int(at if ids is None else ids[at])


def largest(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest scores, ascending; of equal ones at the edge the lower indices."""
    edge = np.partition(scores, -count)[-count]
    above = np.flatnonzero(scores > edge)
    equal = np.flatnonzero(scores == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def log_probability(logits: NDArray[np.float32], chosen: int, logsumexp: float) -> float:
    """Natural log of a token's probability under the model's own distribution (temperature 1, nothing cut)."""
    return share(float(logits[chosen]), logsumexp)


def share(logit: float, logsumexp: float) -> float:
    """The same from the token's logit alone."""
    value = logit - logsumexp
    return min(value, 0.0) if math.isfinite(value) else math.nan
