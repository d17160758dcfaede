"""Each family with each awkward setting: exact mode equals transformers to 1e-4, and 64 greedy tokens are the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.goldens import NEW_TOKENS, error, load
from tests.oracle.settings import SETTINGS

from .models import Converter, engine, greedy, levels, logits

LIMIT = 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("key", SETTINGS)
def test_equals_transformers(key: str, backend: str, converted: Converter) -> None:
    golden = load(key)
    path = converted(key, golden.checkpoint, quantize="fp32")
    with engine(path, backend=backend) as made:
        for run in golden.runs:
            assert error(logits(made, run.prompt), run.logits) < LIMIT
            assert greedy(made, run.prompt, NEW_TOKENS) == run.tokens


@pytest.mark.parametrize("key", SETTINGS)
def test_levels_are_bit_equal(key: str, converted: Converter) -> None:
    """Every ISA level gives the same bits in exact mode, and so the goldens' tokens."""
    golden = load(key)
    path, ids = converted(key, golden.checkpoint, quantize="fp32"), golden.runs[-1].prompt
    first = None
    for level in levels():
        with engine(path, isa=level) as made:
            ours = logits(made, ids)
            assert error(ours, golden.runs[-1].logits) < LIMIT
            if first is None:
                first = ours
            assert np.array_equal(ours.view(np.uint32), first.view(np.uint32)), level


def test_the_machine_has_a_level() -> None:
    assert "plain" in levels()
