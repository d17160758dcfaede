"""Pinning: who is pinned, when it ends, how many may be, and that a pinned expert never leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.events import PageKind
from colibri_lab.ops.layout import PAGE
from colibri_lab.pager.policies import POLICIES

from .fake import FakeFile, check, make_pager


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    file = FakeFile(tmp_path_factory.mktemp("pins") / "experts.bin")
    yield file
    file.close()


def test_a_row_of_tokens_pins_and_a_gap_does_not_unpin(file: FakeFile) -> None:
    events: list[tuple[int, int, int]] = []
    pager = make_pager(file, 6, pin_after=4, pin_share=0.5, on_page=lambda *e: events.append((e[1], e[2], e[3])))
    said = lambda *kinds: [e for e in events if e[0] in kinds]  # noqa: E731

    def token(*experts: int, decode: bool = True) -> None:
        pager.begin(0, decode, 1)
        pager.acquire(0, [*experts])
        pager.acquire(1, [0, 1])

    for _ in range(3):
        token(2, 3)
    token(4, 3)  # breaks the row of 2
    assert said(PageKind.PIN) == [(PageKind.PIN, 0, 3)] + [(PageKind.PIN, 1, e) for e in (0, 1)]
    assert pager.counters()["pinned"] == 3 and pager.room == 3
    token(2, 4)  # a gap of one: less than half of four, so 3 stays
    token(2, 3)
    assert not said(PageKind.UNPIN)
    for _ in range(3):
        token(2, 4)
    assert said(PageKind.UNPIN) == [(PageKind.UNPIN, 0, 3)]
    before = pager.counters()["pin_hits"]
    assert before > 0 and pager.counters()["policy_hits"] == pager.counters()["hits"] - before
    for _ in range(9):
        token(0, 4, decode=False)  # prompt steps pin nobody
    assert (PageKind.PIN, 0, 0) not in events
    check(pager, file)
    pager.close()


def test_the_cap_holds_and_shrinks_with_the_budget(file: FakeFile) -> None:
    pager = make_pager(file, 8, pin_after=1, pin_share=0.5)
    pager.begin(0, True, 1)
    for layer in range(3):
        pager.acquire(layer, [0, 1])
    assert pager.counters()["pinned"] == 4
    pager.resize(5 * file.pages * PAGE)
    assert pager.counters()["pinned"] == 2 and pager.room == 3
    assert (pager.table[1, :2] >= 0).all(), "the pins used last are kept"
    pager.resize(2 * file.pages * PAGE)
    assert pager.counters()["pinned"] == 0 and pager.room == 2
    check(pager, file)
    pager.close()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4), min_size=1, max_size=5)),
            st.sampled_from([0, 1]),
            st.integers(2, 16),
        ),
        max_size=60,
    )
)
def test_pinned_experts_never_leave(file: FakeFile, policy: str, actions: list) -> None:
    left: set[int] = set()

    def told(t: int, kind: int, layer: int, expert: int, *_: int) -> None:
        if kind == PageKind.EVICT:
            left.add(layer * 5 + expert)

    pager = make_pager(file, 7, policy, pin_after=2, pin_share=0.6, on_page=told)
    for action in actions:
        left.clear()
        held = set(pager._pins.held)
        if isinstance(action, tuple):
            wanted = sorted(action[1])[: pager.room]
            pager.chosen(action[0], [wanted] * 3)  # what leaves memory or is pinned has uses all the same
            pager.acquire(action[0], wanted)
            assert not left & held
        elif action > 1:
            pager.resize(action * file.pages * PAGE)
        else:
            pager.begin(0, bool(action), 1)
        assert len(pager._pins.held) <= pager._pins.most and pager.room >= 2
        assert all(pager._run[key] >= 0 for key in pager._pins.held)
        check(pager, file)
    pager.close()
