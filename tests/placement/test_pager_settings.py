"""Any policy, prefetcher and pin, together and under any budget: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.config import EVICTION, PREFETCH
from tests.parity.models import engine, levels

from .conftest import MODELS
from .poison import poisoned
from .test_placement import alone, bits, examples, placed, together


@pytest.mark.parametrize("prefetcher", (*PREFETCH, "next_gate+history+neighbour"))
@pytest.mark.parametrize("policy", EVICTION)
@pytest.mark.parametrize("name", MODELS)
def test_no_policy_and_no_prefetcher_changes_a_token(
    name: str, policy: str, prefetcher: str, models: dict[str, Path]
) -> None:
    path = models[name]
    right, right_bits = alone(path, "exact", "fp32", levels()[0], True)

    @examples(2)
    @given(
        st.floats(0, 0.8),
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
        st.sampled_from([None, 1, 3]),  # pin_after_tokens
        st.sampled_from([None, 1, 20]),  # expert_prefetch_pages
        st.integers(1, 48),
        st.sampled_from([1, 4]),
    )
    def check(share: float, batch: list[int], pin: int | None, pages: int | None, chunk: int, readers: int) -> None:
        how = placed(path, share, 16, prefill_chunk=chunk, pin_after_tokens=pin, pin_max_share=0.7)
        how |= dict(eviction_policy=policy, prefetcher=prefetcher, io_threads=readers, expert_prefetch_pages=pages)
        with poisoned(), engine(path, **how) as made:
            ours = together(made, batch)
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch}
            assert bits(made) == right_bits

    check()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", MODELS)
def test_no_read_between_the_stages_of_two_stage_changes_a_token(name: str, mode: str, models: dict[str, Path]) -> None:
    path = models[name]
    right, right_bits = alone(path, "exact", "fp32", levels()[0], True)
    issued = 0

    @examples(3)
    @given(
        st.floats(0, 0.8),
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
        st.sampled_from(PREFETCH[1:]),
        st.sampled_from(EVICTION),
        st.integers(1, 48),
        st.integers(1, 6),  # rows of a call from which it is made in two
        st.sampled_from([8, 12]),
        st.integers(1, 2),
    )
    def check(share: float, batch: list[int], prefetcher: str, policy: str, chunk: int, rows: int, bits_: int,
              many: int) -> None:  # fmt: skip
        nonlocal issued
        how = placed(path, share, 16, prefill_chunk=chunk, router="two_stage", router_quant_bits=bits_, threads=many)
        how |= dict(eviction_policy=policy, prefetcher=prefetcher, engine_mode=mode)
        with poisoned(), engine(path, **how) as made:
            early, pager = made._parts.early, made._parts.pager
            assert early is not None
            early.least_rows = rows
            ours = together(made, batch)
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch}
            assert bits(made) == right_bits
            assert pager.frames.free + pager.resident + len(pager.ahead.flights) == pager.frames.capacity
            issued += pager.ahead.early.issued

    check()
    assert issued > 0, "the setting must do something"
