"""What a router needs besides logits: its kind and bits, counters, quantised gates, tables. The same for all backends.

Shape legend as in types.py. KINDS and COUNTS have the order of kernels/cpu/types.h and router.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
KINDS = ("softmax", "int8_lut", "bit_level", "two_stage")
QUANTISED = ("int8_lut", "two_stage")  # those that `bits` is for
COUNTS = ("rows", "certified", "fallback", "candidates", "scored", "saturated", "audited", "wrong_selections")
MOST_EXPERTS = 2048
HIDDEN_BITS = 12  # the most of the hidden state's codes, so that 32 products fit into 32 bits

TABLE_STEP, BELOW, PEAK = 1024, 28.0, 4.0  # bit_level: points a unit; reach below the largest logit; where that lies


@dataclass(frozen=True)
class Routing:
    """A bound router. counts and span are written by the backend, one row a layer."""

    kind: str
    bits: int
    audit: bool
    counts: NDArray[np.int64] = field(repr=False)  # [L, len(COUNTS)]
    span: F32 = field(repr=False)  # [L, 2] smallest and largest finite logit; +inf, -inf before the first row

    @classmethod
    def make(cls, layers: int, kind: str = "softmax", bits: int = 8, audit: bool = False) -> Routing:
        """ValueError for an unknown kind or bits outside 8..16."""
        if kind not in KINDS:
            raise ValueError(f"router {kind!r} is none of {', '.join(KINDS)}")
        if not 8 <= bits <= 16:
            raise ValueError(f"a router's codes have 8 to 16 bits, not {bits}")
        span = np.tile(np.array([np.inf, -np.inf], np.float32), (layers, 1))
        return cls(kind, bits, audit, np.zeros((layers, len(COUNTS)), np.int64), span)

    def count(self, layer: int, **counted: int) -> None:
        """Add to a layer's counters."""
        self.counts[layer] += [counted.get(name, 0) for name in COUNTS]

    def add(self, layer: int, low: float, top: float, **counted: int) -> None:
        """One row of a layer, for backends in Python."""
        self.count(layer, **counted)
        self.span[layer] = min(low, self.span[layer, 0]), max(top, self.span[layer, 1])


def default_bits(experts: int) -> int:
    """Bits of codes where nothing is said: more experts lie closer together."""
    return 12 if experts > 64 else 8


@dataclass(frozen=True)
class GateCodes:
    """A gate [E, H] as integers. facts[e]: step, |w - codes| + rounding of |w|, |codes|, |w|: router/two_stage.py."""

    codes: NDArray[np.int16]  # [E rounded up to 4, H rounded up to 32], zeros past both
    facts: NDArray[np.float64]  # [E, 4]


def gate_codes(gate: F32, bits: int) -> GateCodes:
    """Symmetric rounding by row. A row that is not finite has zero codes and infinite facts: it is never shut out."""
    experts, hidden = gate.shape
    last = 2 ** (bits - 1) - 1
    wide = gate.astype(np.float64)
    fine = np.isfinite(wide).all(axis=1)
    wide[~fine] = 0
    step = np.abs(wide).max(axis=1) / last
    codes = np.rint(wide / np.where(step > 0, step, 1)[:, None])
    rounded = codes * step[:, None]
    norm = np.linalg.norm(wide, axis=1)
    gamma = (hidden + 2) * 2.0**-24 / (1 - (hidden + 2) * 2.0**-24)  # of a float32 sum of products in any order
    rest = np.linalg.norm(wide - rounded, axis=1) + gamma * norm
    facts = np.stack([step, rest, np.linalg.norm(rounded, axis=1), norm], axis=1)
    facts[:, 1:] *= 1 + 1e-6  # of these float64 lines
    facts[~fine, 1:] = np.inf
    padded = np.zeros((-(-experts // 4) * 4, -(-hidden // 32) * 32), np.int16)
    padded[:experts, :hidden] = codes
    return GateCodes(padded, np.ascontiguousarray(facts))


def code_block(bits: int) -> int:
    """How many products of codes are sure to fit into a 32-bit sum: a multiple of 32."""
    largest = (2 ** (bits - 1) - 1) * (2 ** (min(bits, HIDDEN_BITS) - 1) - 1)
    return int((2**31 - 1) // largest // 32 * 32)


@cache
def sigmoid_table() -> NDArray[np.uint16]:
    """uint16 [32768], 64 KiB: 65535 sigmoid(i / 1024 - 24), rounded. Entry 28 * 1024 is the largest logit's."""
    at = np.arange(32768) / TABLE_STEP - (BELOW - PEAK)
    table = np.rint(65535 / (1 + np.exp(-at))).astype(np.uint16)
    table.flags.writeable = False
    return table


def threshold_guess(experts: int, k: int) -> tuple[float, float]:
    """Where between mean (0) and largest (1) of `experts` normal numbers the threshold for k of them lies, and what
    one place in rank moves it there (Blom's order statistics)."""

    def at(rank: float) -> float:
        return NormalDist().inv_cdf(1 - (rank - 0.375) / (experts + 0.25))

    if experts == 1:
        return 0.0, 0.0
    middle, largest = at(k + 0.5), at(1)
    step = (at(max(1.0, k - 0.5)) - at(min(experts, k + 1.5))) / 2
    return middle / largest, abs(step) / largest


def as_dtype(gate: F32, dtype: str) -> F32:
    """A gate [E, H] rounded to what fp16, or int8 with one scale a row, can hold; float32 again."""
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return gate.astype(np.float16).astype(np.float32)
    if dtype == "int8":
        top = np.abs(gate).max(axis=1, keepdims=True)
        step = np.where((top > 0) & np.isfinite(top), top / np.float32(127), np.float32(1))
        return np.ascontiguousarray(np.rint(gate / step) * step, np.float32)
    return gate


def report(routing: Routing, sparse: Sequence[bool]) -> list[dict[str, int | float | str | None]]:
    """Per sparse layer: span of the logits, share that the quantiser could not tell apart, a warning or None."""
    rows: list[dict[str, int | float | str | None]] = []
    for layer in np.flatnonzero(sparse):
        counted = dict(zip(COUNTS, routing.counts[layer].tolist(), strict=True))
        low, top = (float(v) for v in routing.span[layer])
        seen = counted["rows"] > 0
        share = counted["saturated"] / max(1, counted["scored"])
        rows.append(
            {
                "layer": int(layer),
                "low": low if seen else None,
                "top": top if seen else None,
                "saturated": share,
                "warning": _warning(routing, int(layer), low, top, share, counted) if seen else None,
            }
        )
    return rows


def _warning(routing: Routing, layer: int, low: float, top: float, share: float, counted: dict[str, int]) -> str | None:
    span = f"layer {layer}: router logits from {low:.4g} to {top:.4g}"
    if routing.kind == "int8_lut" and share > 0:
        return f"{span} are more than {routing.bits} bits tell apart: raise router_quant_bits, or use two_stage"
    if routing.kind == "bit_level" and counted["fallback"] * 2 > counted["rows"]:
        return f"{span}: the threshold fails for over half of the rows: use two_stage or softmax"
    if routing.kind == "two_stage" and counted["fallback"] * 2 > counted["rows"]:
        return f"{span}: over half of the rows are scored in full: raise router_quant_bits, or use softmax"
    return None
