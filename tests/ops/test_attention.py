"""Attention over several tiles of tokens: every way that heads are grouped, the sizes that are constants and others."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops.reference import ReferenceBackend

from .models import LEVELS, Bound, Shape, cpu, make

TOKENS = 131  # four pairs of tiles and three tokens more


@cache
def reference(shape: Shape) -> tuple[Any, list[int], np.ndarray]:
    """A model, tokens, and the oracle's logits."""
    model, tokens = make(shape, 7), np.random.default_rng(7).integers(0, shape.vocab, TOKENS).tolist()
    return model, tokens, Bound(ReferenceBackend(), shape, model=model).run(tokens, chunk=16)


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(16, 4, 64), (4, 1, 64), (8, 1, 64), (20, 5, 64), (5, 5, 128), (10, 2, 128), (6, 2, 80), (6, 3, 16)],
)
def test_long_history(heads, kv_heads, head_dim, level, kv_dtype):
    """Token by token, each history asked for anew, and by sixteen rows over slots anywhere: the same bits."""
    shape = Shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype, layers=1, dtype="fp32", group=0,
                  positions=TOKENS, seats=1)  # fmt: skip
    model, tokens, want = reference(shape)
    backend = cpu(level)
    got = Bound(backend, shape, model=model).run(tokens)
    by_rows = Bound(backend, shape, model=model, shuffle=3).run(tokens, chunk=16)
    backend.close()
    assert np.array_equal(got, by_rows)
    limit = 2e-4 if kv_dtype == "fp16" else 5e-6  # a key near a half of fp16 may go either way
    assert (np.abs(got - want).max(1) <= limit * np.abs(want).max()).all()
