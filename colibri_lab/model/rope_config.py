"""Rotary embedding facts from a config.json.

The old keys (rope_theta, rope_scaling) and the new one (rope_parameters).
"""

from __future__ import annotations

import math
from typing import Any

from .errors import ModelError
from .spec import ROPE_KINDS, Rope


def read_rope(config: dict[str, Any], theta: float, head_dim: int, positions: int, source: str) -> Rope:
    """Rope facts; `theta` is the family's default. ModelError names types that are not supported.

    As in transformers 5: rope_scaling wins over rope_parameters, a theta inside the block wins over rope_theta.
    """
    block = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(block, dict):
        raise ModelError(f"{source}: rope_scaling or rope_parameters is not an object")
    if any(isinstance(value, dict) for value in block.values()):
        raise ModelError(f"{source}: rope_parameters differ by layer type, which is not supported")

    def number(key: str, default: float | None, where: dict[str, Any] = block) -> float:
        value = default if where.get(key) is None else where[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{source}: rope {key} is {value!r:.40}, not a positive number")
        return float(value)

    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(f"{source}: rope type {kind!r:.40} is not supported: only {', '.join(ROPE_KINDS)}")
    for where in (block, config):
        share = where.get("partial_rotary_factor")
        if share is not None and share != 1:
            raise ModelError(f"{source}: partial_rotary_factor {share!r:.40} is not supported: only 1")
    base = number("rope_theta", number("rope_theta", theta, config))
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, "linear", factor=number("factor", None))
    stated = config if config.get("original_max_position_embeddings") is not None else block
    original = int(number("original_max_position_embeddings", positions, stated))
    factor = number("factor", positions / max(original, 1))
    truncate = block.get("truncate")
    if truncate is not None and not isinstance(truncate, bool):
        raise ModelError(f"{source}: rope truncate is {truncate!r:.40}, not true or false")
    return Rope(
        base,
        "yarn",
        factor,
        original,
        number("beta_fast", 32.0) if block.get("beta_fast") else 32.0,
        number("beta_slow", 1.0) if block.get("beta_slow") else 1.0,
        number("attention_factor", _attention_factor(block, factor, number)),
        truncate is not False,
    )


def _attention_factor(block: dict[str, Any], factor: float, number: Any) -> float:
    """YaRN's 0.1 ln(factor) + 1, or the ratio of two such terms where the config has mscale and mscale_all_dim."""

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if block.get("mscale") and block.get("mscale_all_dim"):
        return term(number("mscale", 1.0)) / term(number("mscale_all_dim", 1.0))
    return term(1.0)
