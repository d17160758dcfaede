"""Weights that a format holds exactly come out exactly: logits equal the oracle's to 1e-5, nothing hides in noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.makers import FAMILIES, make
from tests.oracle.goldens import error
from tests.oracle.numpy_oracle import Oracle

from .models import Converter, engine, levels, logits

PROMPT = np.random.default_rng(5).integers(3, 60, 24).tolist()
SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "odd": {"hidden_size": 40, "vocab_size": 61, "num_local_experts": 5, "num_experts": 5},
    "wide": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
}


def overrides(family: str, shape: str) -> dict[str, Any]:
    """The shape's overrides for a family; expert widths that no group divides."""
    made = dict(SHAPES[shape])
    made.pop("num_experts" if family == "mixtral" else "num_local_experts", None)
    if shape in ("odd", "wide"):
        width = {"odd": 25, "wide": 72}[shape]
        made["intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"] = width
    return made


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_weights(family: str, quantize: str, shape: str, backend: str, converted: Converter) -> None:
    made = make(family, 11, exact=quantize, **overrides(family, shape))
    path = converted(f"exact-{family}-{shape}", lambda: made, quantize=quantize)
    right = Oracle(made.config, made.tensors).logits(PROMPT)
    with engine(path, backend=backend) as model:
        assert error(logits(model, PROMPT), right) < 1e-5


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_wider_groups(quantize: str, group: int, converted: Converter) -> None:
    made = make("qwen2_moe", 12, exact=quantize, **overrides("qwen2_moe", "wide"))
    path = converted("exact-groups", lambda: made, quantize=quantize, group_size=group)
    right = Oracle(made.config, made.tensors).logits(PROMPT)
    for level in levels():
        with engine(path, isa=level) as model:
            assert error(logits(model, PROMPT), right) < 1e-5


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_sources(family: str, dtype: str, converted: Converter, tmp_path: Any) -> None:
    """fp16 and bf16 sources read as what they say; fp16 files hold an fp16 source without loss."""
    made = make(family, 13)
    seen = made.as_seen(dtype)
    source = made.save(tmp_path / "source", dtype=dtype, shards=2)
    right = Oracle(seen.config, seen.tensors).logits(PROMPT)
    assert error(Oracle(made.config, made.tensors).logits(PROMPT), right) > 1e-4, (
        "rounding must show, or this proves nothing"
    )
    path = converted(f"half-{family}-{dtype}", source, quantize="fp16" if dtype == "F16" else "fp32")
    with engine(path) as model:
        assert error(logits(model, PROMPT), right) < 1e-5


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_fast_mode_is_near(quantize: str, converted: Converter) -> None:
    """8-bit activations cost a little and not nothing: the switch does something, and the same on every backend."""
    made = make("mixtral", 14, exact=quantize, hidden_size=64, intermediate_size=64)
    path = converted("fast-mode", lambda: made, quantize=quantize)
    right = Oracle(made.config, made.tensors).logits(PROMPT)
    with engine(path, precision="fast", backend="reference") as model:
        reference = logits(model, PROMPT)
    for level in levels():
        with engine(path, precision="fast", isa=level) as model:
            ours = logits(model, PROMPT)
        rows = np.abs(ours - right).max(1) / np.abs(right).max()  # the median: a row whose routing flips is far off
        assert 1e-4 < np.median(rows) < 0.04
        assert error(ours, reference) < 1e-5
