"""The routers' choices in NumPy, one row at a time, clarity before speed: the oracle of kernels/cpu/router*.c.

Each takes logits float32 [E] (two_stage: gate and x) and gives a Choice. Integers, selections and counters equal the C
kernels' bit for bit; weights do up to the last place of exp. NotFinite where a logit is NaN or the largest not finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .routing import BELOW, F32, HIDDEN_BITS, TABLE_STEP, GateCodes, sigmoid_table, threshold_guess

COARSE = np.float32(0.25)  # int8_lut: a step of the codes that changes a weight by more than a quarter


class NotFinite(ArithmeticError):
    """A row has no right choice."""


@dataclass(frozen=True)
class Choice:
    """experts int32 [k], best first; weights float32 [k]; span of the finite logits; what is counted."""

    experts: NDArray[np.int32]
    weights: F32
    low: float
    top: float
    counted: dict[str, int] = field(default_factory=dict)


def lane_sum(x: F32) -> np.float32:
    """Sum in the kernels' order: sixteen lanes, then i + 8, i + 4, i + 2, i + 1."""
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    lanes = np.zeros(16, np.float32)
    for part in padded.reshape(-1, 16):
        lanes = lanes + part
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return np.float32(lanes[0])


def span(logits: F32) -> tuple[np.float32, np.float32]:
    """Smallest and largest finite logit."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise NotFinite
    return logits[np.isfinite(logits)].min(), logits.max()


def top_k(keys: NDArray[np.generic], k: int) -> NDArray[np.int32]:
    """The k largest, best first, ties to the lower index."""
    return np.argsort(-keys.astype(np.float64), kind="stable")[:k].astype(np.int32)


def softmax(logits: F32, k: int, normalise: bool) -> Choice:
    """Exact selection; probabilities over all experts, or divided by the chosen ones' sum."""
    low, top = span(logits)
    experts = top_k(logits, k)
    with np.errstate(over="ignore"):  # -inf, whose exp is 0
        e = np.exp(logits - top)
    weights = e[experts] / (e[experts].sum() if normalise else e.sum())
    return Choice(experts, weights, float(low), float(top), {"rows": 1, "scored": len(logits)})


def int8_lut(logits: F32, k: int, normalise: bool, bits: int) -> Choice:
    """Codes between the smallest and the largest logit, ranked as integers; exp from a table by distance to the top."""
    low, top = span(logits)
    last = np.float32(2**bits - 1)
    with np.errstate(over="ignore"):
        width = top - low
    if not np.isfinite(width):
        exact = softmax(logits, k, normalise)
        return Choice(exact.experts, exact.weights, exact.low, exact.top, exact.counted | {"fallback": 1})
    step = width / last
    inverse = last / width if width >= np.float32(1e-30) else np.float32(0)
    open_ = np.isfinite(logits)  # -inf shuts an expert out: code 0, weight 0
    codes = np.zeros(len(logits), np.int64)
    codes[open_] = np.rint((logits[open_] - low) * inverse) + 1
    experts = top_k(codes, k)
    entries = _table(step, bits)[2**bits - np.maximum(codes, 1)] * open_
    weights = entries[experts] / (entries[experts].sum() if normalise else entries.sum())
    counted = {"rows": 1, "scored": len(logits), "saturated": len(logits) if step > COARSE else 0}
    return Choice(experts, weights.astype(np.float32), float(low), float(top), counted)


def _table(step: np.float32, bits: int) -> F32:
    """exp(-d * step) for d < 2 ** bits, as the outer product of tables of sixteen."""
    table = np.ones(1, np.float32)
    for j in range(-(-bits // 4)):
        with np.errstate(over="ignore"):  # entries past the last code
            digit = np.exp(-np.arange(16, dtype=np.float32) * np.float32(16**j) * step)
        table = (digit[:, None] * table[None]).reshape(-1)
    return table


def bit_level(logits: F32, k: int, normalise: bool) -> Choice:
    """Table values of the row moved to a largest logit of 4; the threshold that exactly k reach, else softmax."""
    low, top = span(logits)
    table, (place, slope) = sigmoid_table(), threshold_guess(len(logits), k)
    with np.errstate(over="ignore"):
        z = np.maximum(logits - top, np.float32(-BELOW))
    index = _index(z)  # thresholds are indices: values rise with them
    values = table[index].astype(np.int64)
    mean = lane_sum(z) / np.float32(len(z))
    guess = mean * (np.float32(1) - np.float32(place))
    threshold = int(_index(guess))
    count = int((index >= threshold).sum())
    for move in range(3):
        if count == k:
            break
        steps = abs(count - k)
        if steps > 3:
            if move == 2:
                break
            guess = guess - np.float32(count - k) * np.float32(slope) * mean
            threshold = int(_index(guess))
        elif count > k:
            for _ in range(steps):
                threshold = int(min(index[index >= threshold], default=2**31 - 2)) + 1
        else:
            for _ in range(steps):
                threshold = int(max(index[index < threshold], default=0))
        count = int((index >= threshold).sum())
    counted = {"rows": 1, "scored": len(logits), "saturated": int((values == 0).sum())}
    if count != k:
        exact = softmax(logits, k, normalise)
        return Choice(exact.experts, exact.weights, exact.low, exact.top, counted | {"fallback": 1})
    chosen = np.flatnonzero(index >= threshold)
    experts = chosen[top_k(logits[chosen], k)].astype(np.int32)
    odds = values.astype(np.float32) / (65536 - values).astype(np.float32)  # s / (1 - s) of the sigmoid is e^x
    weights = odds[experts] / (odds[experts].sum() if normalise else odds.sum())
    return Choice(experts, weights, float(low), float(top), counted)


def _index(z: F32 | np.float32) -> NDArray[np.int64]:
    inside = np.clip(z, np.float32(-BELOW), np.float32(0))
    return np.asarray(np.rint((inside + np.float32(BELOW)) * np.float32(TABLE_STEP))).astype(np.int64)


def first_stage(codes: GateCodes, x: F32, k: int, bits: int) -> tuple[NDArray[np.int64] | None, NDArray[np.int32]]:
    """Experts that hold the true k best for sure, or None when the bound does not shut out half of them; and the k with
    the largest of the least possible logits, best first, or -1s [k] where there is no bound.

    See router/two_stage.py for the derivation.
    """
    unknown = np.full(k, -1, np.int32)
    bits_x = min(bits, HIDDEN_BITS)
    last, peak = np.float32(2 ** (bits_x - 1) - 1), np.abs(x).max()
    if not np.float32(1e-12) <= peak <= np.float32(1e15):
        return None, unknown
    step = peak / last
    p = np.rint(x * (last / peak))
    u = x - p * step
    up = 1.0 + (len(x) + 32) * 2.0**-23
    norm = np.sqrt(float(lane_sum(x * x))) * up
    rest = np.sqrt(float(lane_sum(u * u))) * up + norm * 2.0**-22
    facts = codes.facts
    shut = facts[:, 3] * norm <= 1e37
    if (~shut & (facts[:, 3] <= 1e300)).any():
        return None, unknown
    sums = codes.codes[: len(facts), : len(x)].astype(np.int64) @ p.astype(np.int64)
    logits = facts[:, 0] * float(step) * sums
    with np.errstate(invalid="ignore", over="ignore"):
        error = facts[:, 1] * norm + facts[:, 2] * rest
        error += (np.abs(logits) + error) * 2.0**-20 + (len(x) + 4) * 2.0**-148  # the last for products that underflow
        low = np.where(shut, logits - error, -np.inf).astype(np.float32)
        high = np.where(shut, logits + error, np.inf).astype(np.float32)
    fast = top_k(low, k)
    found = np.flatnonzero(high >= low[fast[-1]])
    return found if len(found) == k or 2 * len(found) <= len(low) else None, fast


def two_stage(gate: F32, codes: GateCodes, x: F32, k: int, normalise: bool, bits: int) -> tuple[Choice, F32]:
    """Both stages: see `second_stage`."""
    return second_stage(gate, first_stage(codes, x, k, bits)[0], x, k, normalise)


def second_stage(gate: F32, found: NDArray[np.int64] | None, x: F32, k: int, normalise: bool) -> tuple[Choice, F32]:
    """found: of the first stage. The choice of softmax, and the logits [E] that it was made from: -inf where the
    certificate made one needless."""
    logits = gate @ x  # in full, as a sum's order may depend on the shape of a product
    if found is not None and normalise:
        kept = np.full(len(logits), -np.inf, np.float32)
        kept[found] = logits[found]
        logits = kept
    choice = softmax(logits, k, normalise)
    scored = len(logits) if found is None or not normalise else len(found)
    counted = {"rows": 1, "certified": int(found is not None), "fallback": int(found is None)}
    counted |= {"candidates": 0 if found is None else len(found), "scored": scored}
    return Choice(choice.experts, choice.weights, choice.low, choice.top, counted), logits
