"""The two rings: groups are dealt whole and in order, units come out as they went in, fills stay within bounds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.dispatch.rings import AHEAD, Rings


@dataclass
class Unit:
    at: int
    n: int


@given(
    st.integers(1, 300), st.none() | st.sampled_from([1, 2, 8, 64, 512]), st.none() | st.floats(0.01, 1), st.booleans()
)
def test_groups_are_all_rows_once_and_fit(n: int, size: int | None, watermark: float | None, pays: bool) -> None:
    rings = Rings[Unit](size, watermark)
    groups = rings.deal(n, pays)
    assert [row for at, count in groups for row in range(at, at + count)] == list(range(n))
    counts = [count for _, count in groups]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1
    now = rings.counters()["ring_size"]
    assert now & (now - 1) == 0 and (size is None or now == size)
    assert max(counts) <= max(1, now * rings.watermark)
    if size is None:
        assert len(groups) == (2 if pays and n > 1 else 1)
    else:
        assert len(groups) == -(-n // max(1, int(size * rings.watermark)))


@given(st.lists(st.booleans(), max_size=60), st.integers(2, 40))
def test_first_in_first_out_over_both(moves: list[bool], n: int) -> None:
    rings, went, came = Rings[Unit](8, 0.5), list[Unit](), list[Unit]()
    groups = rings.deal(n, False)
    for put in moves:
        at, count = groups[len(went) % len(groups)]
        if put and not rings.full(count):
            rings.put(unit := Unit(at, count))
            went.append(unit)
            assert rings.holds(at)
        elif len(rings):
            came.append(rings.take())
        fills = rings.counters()
        assert fills["ring_a_fill"] + fills["ring_b_fill"] == sum(u.n for u in went[len(came) :])
        assert max(fills["ring_a_fill"], fills["ring_b_fill"]) <= 8 and len(rings) <= AHEAD
    assert came == went[: len(came)]
    assert rings.clear() == went[len(came) :] and len(rings) == 0
    assert rings.counters()["ring_fill_share_most"] <= 0.5


def test_the_producer_is_never_more_than_two_units_ahead() -> None:
    rings = Rings[Unit](64, None)
    rings.deal(3, False)
    for at in range(AHEAD):
        assert not rings.full(1)
        rings.put(Unit(at, 1))
    assert rings.full(1)
    rings.take()
    assert not rings.full(1)
    with pytest.raises(IndexError):
        rings.take(), rings.take()
