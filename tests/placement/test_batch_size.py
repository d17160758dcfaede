"""Whatever the machine is said to be like, and however often the batch size follows it: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.engine.probe import Reading
from tests.parity.models import engine, levels

from .conftest import MODELS
from .poison import poisoned
from .test_placement import alone, batches, bits, budgets, chunks, examples, placed, slot_sizes, together

readings = st.builds(Reading, st.sampled_from([0.5, 0.82, 0.95]), st.sampled_from([0.1, 0.9]))


class Cycle:
    """Readings over and over."""

    def __init__(self, readings: list[Reading]) -> None:
        self._readings, self._at = readings, 0

    def read(self) -> Reading:
        self._at += 1
        return self._readings[self._at % len(self._readings)]


@pytest.mark.parametrize("name", MODELS)
def test_no_batch_size_changes_a_token(name: str, models: dict[str, Path]) -> None:
    path = models[name]
    right, right_bits = alone(path, "exact", "fp32", levels()[0], True)
    halved = 0

    @examples(6 if name == "tiny-moe" else 12)
    @given(
        st.lists(readings, min_size=1, max_size=8),
        batches,
        budgets,
        chunks,
        slot_sizes,
        st.integers(1, 8),
        st.sampled_from(["sync", "async"]),
    )
    def check(seen: list[Reading], batch: list[int], share: float, chunk: int, size: int, most: int, mode: str) -> None:
        nonlocal halved
        how = placed(path, share, size, batch=most, prefill_chunk=chunk, batch_adapt_interval_ms=1, engine_mode=mode)
        with poisoned(), engine(path, **how) as made:
            made.watch(Cycle(seen))
            ours = together(made, batch)
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch}
            assert bits(made) == right_bits
            halved += made.counters()["batch"]["halvings"]

    check()
    assert halved > 0, "the setting must do something"
