"""Placement changes speed, never tokens: bit-equal for every cache size, batch, chunk, slot size and thread count."""

from __future__ import annotations

import numpy as np
import pytest

from .conftest import Load

IDS = [1, *range(40, 61), 7, 7, 300, 2999]
PROMPTS = [IDS[:4], IDS, [5], IDS[3:20], IDS[::-1], [9, 9], IDS[:13], [1]]


@pytest.fixture(scope="module")
def truth(model: object) -> dict:
    from colibri_lab.engine import Engine

    with Engine.load(model, threads=1) as engine:  # type: ignore[arg-type]
        tokens = [[(t.id, t.logprob) for t in engine.generate(p, max_tokens=6)] for p in PROMPTS]
        return {"logits": engine.logits(IDS), "tokens": tokens}


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_cache_bytes": "128KiB"},  # two experts: the least; waves of two
        {"expert_cache_bytes": "192KiB", "prefill_chunk": 3},
        {"expert_cache_bytes": "1MiB", "max_batch_size": 2, "threads": 2},
        {"expert_cache_bytes": "7MiB", "prefill_chunk": 1, "kv_cache_slot_size": 1},
        {"max_batch_size": 1, "prefill_chunk": 7, "kv_cache_slot_size": 5},
        {"max_batch_size": 3, "threads": 2, "io_threads": 1, "kv_cache_slot_size": 1024},
        {"telemetry": False, "kv_cache_max_slots": 4000},
    ],
)
def test_bit_equal(load: Load, truth: dict, settings: dict) -> None:
    engine = load(**settings)
    assert (engine.logits(IDS).view(np.uint32) == truth["logits"].view(np.uint32)).all()
    got: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
    for i, token in engine.generate_batch(PROMPTS, max_tokens=6):
        got[i].append((token.id, token.logprob))
    assert got == truth["tokens"]
    counters = engine.counters()
    assert counters["dispatch"]["bytes_copied"] == 0
    if engine.describe()["expert_cache_bytes"] < engine.describe()["experts_total_bytes"]:
        assert counters["pager"]["evictions"] > 0
        assert (
            counters["pager"]["frames_used"]
            <= counters["pager"]["frames"]
            == engine.settings.expert_cache_bytes // 65536
        )


def test_the_same_with_budgets_changing_all_the_time(load: Load, truth: dict) -> None:
    engine = load()
    got: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
    for i, token in engine.generate_batch(PROMPTS, max_tokens=6):
        got[i].append((token.id, token.logprob))
        engine.settings.set(expert_cache_bytes=65536 * (2 + (i * 37 + token.id) % 127), prefill_chunk=1 + token.id % 9)
    assert got == truth["tokens"]


def test_poisoned_frames_and_slots_change_nothing(load: Load, truth: dict) -> None:
    """What was evicted or freed is overwritten with NaN: nothing stale is ever read."""
    engine = load(expert_cache_bytes="192KiB", kv_cache_slot_size=4)
    parts = engine._parts
    parts.pager.frames.poison = True
    release = parts.kv.slots.release

    def poisoned(slot: int) -> None:
        size = parts.kv.slots.size
        parts.kv.pool.k[slot * size : (slot + 1) * size] = np.nan
        parts.kv.pool.v[slot * size : (slot + 1) * size] = np.nan
        release(slot)

    parts.kv.slots.release = poisoned  # type: ignore[method-assign]
    for _ in range(2):
        got: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
        for i, token in engine.generate_batch(PROMPTS, max_tokens=6):
            got[i].append((token.id, token.logprob))
        assert got == truth["tokens"]
