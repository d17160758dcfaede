"""`engine_mode: async` says what sync says, bit by bit, whatever rings, budgets, prefetchers and policies there are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.config import EVICTION, PREFETCH
from colibri_lab.errors import RequestError
from colibri_lab.pager.queue import QueueTransfer
from colibri_lab.pager.reader import Reader
from colibri_lab.pager.threads import ThreadFlight
from tests.parity.models import engine, levels

from .conftest import MODELS
from .poison import poisoned
from .test_placement import (
    PROMPTS,
    SAMPLED,
    TOKENS,
    alone,
    batches,
    bits,
    budgets,
    chunks,
    examples,
    least_and_most,
    placed,
    said,
    slot_sizes,
    threads,
    together,
)

rings = st.none() | st.sampled_from([1, 2, 4, 16, 64])
watermarks = st.none() | st.floats(0.05, 1)
systems = st.tuples(st.sampled_from(PREFETCH), st.sampled_from(EVICTION), st.sampled_from([None, 2, 100]))
ways = st.tuples(st.sampled_from(["fp16", "fp32"]), st.sampled_from(levels()), st.booleans())  # KV, ISA, greedy


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_async_changes_no_token(name: str, precision: str, models: dict[str, Path]) -> None:
    path = models[name]

    @examples(12 if name == "tiny-moe" else 24)
    @given(budgets, batches, chunks, threads, slot_sizes, rings, watermarks, systems, ways)
    def check(share: float, batch: list[int], chunk: int, many: int, size: int, ring: int | None,
              watermark: float | None, system: tuple[Any, ...], way: tuple[Any, ...]) -> None:  # fmt: skip
        (prefetcher, policy, pin), (kv, isa, greedy) = system, way
        first = levels()[0] if precision == "exact" else isa
        right, right_bits = alone(path, precision, kv, first, greedy)
        how = placed(path, share, size, prefill_chunk=chunk, threads=many, precision=precision, kv_cache_dtype=kv)
        how |= {"engine_mode": "async", "dispatch_ring_size": ring, "dispatch_watermark": watermark}
        how |= {"prefetcher": prefetcher, "eviction_policy": policy, "pin_after_tokens": pin}
        with poisoned(), engine(path, isa=isa, **how) as made:
            ours = together(made, batch, **({} if greedy else SAMPLED))
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch}
            assert bits(made) == right_bits
            done, pager = made.counters()["dispatch"], made._parts.pager
            assert done["units"] > 0 and done["bytes_copied"] == 0 and not pager._held
            assert done["ring_a_fill"] == done["ring_b_fill"] == 0

    check()


@pytest.mark.parametrize("router", ["int8_lut", "bit_level", "two_stage"])
def test_async_changes_no_token_with_any_router(router: str, models: dict[str, Path]) -> None:
    path = models["tiny-moe"]
    with engine(path, threads=1, max_batch_size=1, router=router) as made:
        right, right_bits = [[said(t) for t in made.generate(p, max_tokens=TOKENS)] for p in PROMPTS], bits(made)

    @examples(5)
    @given(budgets, batches, chunks, rings, st.booleans())
    def check(share: float, batch: list[int], chunk: int, ring: int | None, audit: bool) -> None:
        how = placed(path, share, 16, prefill_chunk=chunk, router=router, router_audit=audit)
        with poisoned(), engine(path, engine_mode="async", dispatch_ring_size=ring, **how) as made:
            ours = together(made, batch)
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch} and bits(made) == right_bits

    check()


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_backend_waits_for_pages_too(name: str, models: dict[str, Path]) -> None:
    path = models[name]
    with engine(path, backend="reference") as made:
        right = {i: [said(t) for t in made.generate(PROMPTS[i], max_tokens=4)] for i in (2, 5)}
    how = placed(path, 0.1, 3, prefill_chunk=3, engine_mode="async", dispatch_ring_size=2)
    with poisoned(), engine(path, backend="reference", **how) as made:
        assert made.describe()["reads"] == "threads"
        ours = {i: [said(t) for t in made.generate(PROMPTS[i], max_tokens=4)] for i in (2, 5)}
    assert ours == right


@pytest.mark.parametrize("name", ["qwen2_moe", "tiny-moe"])
def test_settings_may_change_while_async_generates(name: str, models: dict[str, Path]) -> None:
    path = models[name]
    least, most = least_and_most(path)
    right, right_bits = alone(path, "exact", "fp32", levels()[0], True)

    @examples(6)
    @given(st.lists(st.tuples(budgets, st.sampled_from(EVICTION)), min_size=TOKENS, max_size=TOKENS))
    def check(changes: list[tuple[float, str]]) -> None:
        with poisoned(), engine(path, engine_mode="async", prefetcher="next_gate", kv_cache_max_slots=512) as made:
            ours = []
            for token, (share, policy) in zip(made.generate(PROMPTS[5], max_tokens=TOKENS), changes, strict=True):
                ours.append(said(token))
                made.settings.set(expert_cache_bytes=int(least + share * (most - least)), eviction_policy=policy)
            assert ours == right[5] and bits(made) == right_bits

    check()


def test_the_check_can_fail_in_async_too(models: dict[str, Path]) -> None:
    """Control: pages that are told of before they are there, and what comes out is not finite."""
    fetch = Reader._fetch

    def slow(*arguments: Any) -> Any:
        time.sleep(0.01)
        return fetch(*arguments)

    def too_early(flight: ThreadFlight) -> None:
        flight._entries[:] = flight._frames

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "_fetch", slow)
        patch.setattr(ThreadFlight, "publish", too_early)
        patch.setattr(QueueTransfer, "open", lambda *arguments: None)
        with poisoned(), engine(models["mixtral"], engine_mode="async") as made:
            with pytest.raises(RequestError, match="not finite"):
                bits(made)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_pins_between_two_waves_of_a_layer(mode: str, models: dict[str, Path]) -> None:
    """A budget of a few experts, eight rows that need more, and pins on the way: every wave still finds room."""
    right, _ = alone(models["tiny-moe"], "exact", "fp32", levels()[0], True)
    how = {"pin_after_tokens": 2, "pin_max_share": 0.5, "engine_mode": mode, "threads": 1}
    for experts in (4, 5, 6):
        with poisoned(), engine(models["tiny-moe"], expert_cache_bytes=experts * 65536, **how) as made:
            ours = together(made, list(range(8)))
            assert [ours[i] for i in range(8)] == right and made.counters()["pager"]["pins"] > 0
