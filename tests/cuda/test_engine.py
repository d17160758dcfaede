"""The whole engine on `backend: sim`: the tokens of the reference, whatever the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.errors import NotAvailable
from tests.makers import FAMILIES
from tests.parity.models import engine, greedy, logits

PROMPT = [5, 9, 33, 2, 60, 17, 8]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_sixteen_tokens_of_the_reference(converted: dict[str, Path], family: str, precision: str) -> None:
    said, scores = {}, {}
    for backend in ("reference", "sim"):
        with engine(converted[family], backend=backend, precision=precision) as made:
            said[backend], scores[backend] = greedy(made, PROMPT, 16), logits(made, PROMPT)
            assert made.describe()["backend"] == backend
    assert said["sim"] == said["reference"] and len(said["sim"]) == 16
    limit = 1e-5 if precision == "exact" else 2e-2
    assert np.abs(scores["sim"] - scores["reference"]).max() <= limit * np.abs(scores["reference"]).max()


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_cache_bytes": 3 << 16, "eviction_policy": "lru"},
        {"prefill_chunk": 2, "kv_cache_slot_size": 3},
        {"engine_mode": "async", "expert_cache_bytes": 4 << 16, "prefetcher": "next_gate+history"},
        {"router": "two_stage"},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_settings_change_no_token(converted: dict[str, Path], settings: dict[str, Any]) -> None:
    """A cache of the least experts, chunks, small slots, the pipeline with guesses, the exact two-stage router."""
    with (
        engine(converted["mixtral"], backend="sim") as plain,
        engine(converted["mixtral"], backend="sim", **settings) as made,
    ):
        assert greedy(made, PROMPT, 12) == greedy(plain, PROMPT, 12)
        assert np.array_equal(logits(made, PROMPT), logits(plain, PROMPT))
        if "expert_cache_bytes" in settings:
            assert made.counters()["pager"]["evictions"] > 0


def test_persistence_waits_for_its_turn(converted: dict[str, Path], tmp_path: Path) -> None:
    where = {"kv_cache_persistence_path": tmp_path / "kv"}
    with (
        pytest.raises(NotAvailable, match="not available yet with backend: sim"),
        engine(converted["mixtral"], backend="sim", **where),
    ):
        raise AssertionError("an engine was made")
