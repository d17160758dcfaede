"""Reads between a router's two stages: guesses at the running layer, which follow the rules of all guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.ops.types import Rows
from colibri_lab.pager.early import EarlyReads
from colibri_lab.pager.lookahead import Lookahead
from colibri_lab.pager.pager import Pager

from .fake import KINDS, FakeFile, check, make_pager
from .test_prefetch import Gate, counts, landed

ROWS = 8


class Stages:
    """A backend that has these ids after its first stage, those after its second; `between` runs at its beginning."""

    def __init__(self, rows: Rows, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]],
                 between: Callable[[], Any] = lambda: None) -> None:  # fmt: skip
        self._rows, self._first, self._second, self._between = rows, first, second, between

    def first_stage(self, layer: int, n: int, at: int) -> None:
        self._rows.experts[at : at + n] = self._first

    def second_stage(self, layer: int, n: int, at: int) -> None:
        self._between()
        self._rows.experts[at : at + n] = self._second


class Nothing:
    """A prefetcher that never guesses."""

    def guess(self, layer: int, chosen: Any, missing: Any) -> Any:
        return layer, ()


NOTHING = Nothing()


def made(file: FakeFile, runs: float, kind: str = "queue", pages: int | None = 99, most: int | None = None,
         prefetcher: Any = NOTHING) -> tuple[Pager, EarlyReads, Rows]:  # fmt: skip
    """A pager, and what begins reads for it from one row on. pages: of a guess; most: guesses at a time."""
    pager = make_pager(file, runs, kind=kind)
    ahead = Lookahead(pager, lambda chosen: {} if chosen is None else {"nothing": chosen}, pages)
    ahead.follow(prefetcher)
    rows = Rows.allocate(ROWS, 16, file.experts, 2, 4)
    early = EarlyReads(pager, ahead, rows, 1)
    assert early.least_rows > ROWS and not early.pays(0, ROWS), "so small a second stage is over before a second call"
    early.least_rows = 1
    if most is not None:
        pager.ahead.most = most
    return pager, early, rows


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    file = FakeFile(tmp_path_factory.mktemp("early") / "experts.bin", experts=8)
    yield file
    file.close()


def early_counts(pager: Pager) -> dict[str, float]:
    return {k.removeprefix("early_"): v for k, v in pager.counters().items() if k.startswith("early_")}


def closed_books(pager: Pager) -> None:
    pager.close()
    for c in (counts(pager), early_counts(pager)):
        assert c["issued"] == c["hits"] + c["late"] + c["wasted"] + c["cancelled"] + c["failed"]
    assert early_counts(pager)["useful"] >= early_counts(pager)["hits"]
    assert pager.frames.free == pager.frames.capacity - pager.resident


@pytest.mark.parametrize("kind", KINDS)
def test_what_most_rows_want_is_read_before_the_second_stage(file: FakeFile, kind: str) -> None:
    pager, early, rows = made(file, 12, kind, most=3)
    pager.acquire(1, [0])
    before = pager.evictions, pager.resident
    ids = [[0, 5], [0, 5], [7, 5], [7, 2]]  # 0 is there; of the others 5 has three votes, 7 two, 2 one

    def between() -> None:
        assert list(pager.ahead.flights) == [8 + 5, 8 + 7, 8 + 2], "keys, most wanted first"
        assert (pager.evictions, pager.resident) == before and (pager.table[1, 1:] < 0).all()
        landed(pager)

    assert early.pays(1, 4)
    spent = early.attend(Stages(rows, ids, ids, between), 1, 4)
    assert spent > 0 and rows.experts[:4].tolist() == ids
    pager.acquire(1, [0, 2, 5, 7])
    c = early_counts(pager)
    assert (c["issued"], c["hits"], c["useful"], c["late"], c["cancelled"]) == (3, 3, 3, 0, 0)
    assert c["bytes"] == 3 * pager.frames.run_bytes == counts(pager)["bytes"] and counts(pager)["hits"] == 3
    check(pager, file)
    closed_books(pager)


def test_wrong_ids_are_cancelled_or_wasted(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three readers are held up with the first guesses; of the rest what is wrong is not read, what is right stays."""
    gate = Gate(monkeypatch)
    pager, early, rows = made(file, 20, "threads", most=7)

    def begun() -> None:
        for _ in range(3):
            assert gate.begun.acquire(timeout=20)

    first = [[0, 1], [0, 1], [0, 2], [1, 2], [2, 3], [3, 4], [4, 5]]  # wanted in the order of their numbers
    early.attend(Stages(rows, first, [[6, 4]] * 7, begun), 2, 7)
    c = early_counts(pager)
    assert (c["issued"], c["cancelled"], c["wasted"]) == (6, 2, 0), "3 and 5 were queued and are wrong"
    assert set(pager.ahead.flights) == {16 + e for e in (0, 1, 2, 4)}
    pager.acquire(2, [4, 6])  # 4 was still queued: read at once, as what is needed
    c = early_counts(pager)
    assert (c["late"], c["useful"], c["bytes"]) == (1, 0, 0) and pager.counters()["faults"] == 2
    gate.open.set()
    landed(pager)
    check(pager, file)
    closed_books(pager)
    assert early_counts(pager)["wasted"] == 3 and early_counts(pager)["bytes"] == 3 * pager.frames.run_bytes


def test_a_read_under_way_is_useful_though_late(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    pager, early, rows = made(file, 12, "threads", most=2)
    early.attend(Stages(rows, [[1, 2]], [[1, 2]], lambda: gate.begun.acquire(timeout=20)), 0, 1)
    assert gate.begun.acquire(timeout=20), "both have begun"
    load = pager._transfer.load

    def let_through(flights: Any) -> None:
        gate.open.set()  # they have been asked for, and had not landed
        load(flights)

    monkeypatch.setattr(pager._transfer, "load", let_through)
    pager.acquire(0, [1, 2])
    c = early_counts(pager)
    assert (c["hits"], c["late"], c["useful"]) == (0, 2, 2)
    check(pager, file)
    closed_books(pager)


@pytest.mark.parametrize("kind", KINDS)
def test_other_guesses_give_way_and_those_at_the_same_experts_stay(file: FakeFile, kind: str) -> None:
    pager, early, rows = made(file, 12, kind, most=3)
    pager.prefetch(0, [1])
    pager.prefetch(1, [6, 3])
    landed(pager)
    early.attend(Stages(rows, [[6, 2], [2, 4], [6, 2]], [[6, 2]] * 3), 1, 3)
    assert set(pager.ahead.flights) | {8 + 4} == {8 + 6, 8 + 2, 8 + 4}, "6 was guessed before, and is wanted"
    assert not pager.ahead.flights[8 + 6].early and pager.ahead.flights[8 + 2].early
    assert counts(pager)["wasted"] == 2 and early_counts(pager)["issued"] == 2
    early.attend(Stages(rows, [[6, 2], [4, 0]], [[6, 2]] * 2), 1, 2)
    assert {8 + 6, 8 + 2} <= set(pager.ahead.flights), "none of its own is given up for another of its own"
    landed(pager)
    closed_books(pager)


def test_when_it_does_not_pay(file: FakeFile) -> None:
    pager, early, rows = made(file, 12)
    assert early.pays(0, 1)
    early.least_rows = 3
    assert not early.pays(0, 2) and early.pays(0, 3)
    pager.acquire(0, range(4))
    pager.acquire(0, range(4, 8))
    assert not early.pays(0, 3) and early.pays(1, 3), "all of the layer is there"
    early.attend(Stages(rows, [[-1, -1]] * 3, [[0, 1]] * 3), 1, 3)
    assert early_counts(pager)["issued"] == 0, "rows without a bound have no ids"
    early._ahead.follow(None)
    assert not early.pays(1, 3), "no prefetcher, no frames for guesses"
    closed_books(pager)
    for pages in (0, 1):
        pager, early, rows = made(file, 12, pages=pages)
        assert early.pays(0, 3) == (pages > 0)
        if pages:
            early.attend(Stages(rows, [[5, 4]], [[5, 4]]), 0, 1)
            assert early_counts(pager)["issued"] == 1, "expert_prefetch_pages is the most"
        closed_books(pager)


ids = st.lists(st.integers(-1, 7), min_size=2, max_size=2)
pairs = st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.integers(3, 26), st.lists(st.tuples(st.integers(0, 2), st.lists(st.tuples(ids, pairs), min_size=1,
       max_size=ROWS), st.permutations(range(8)), st.booleans()), max_size=20))  # fmt: skip
def test_any_ids(file: FakeFile, kind: str, runs: int, steps: list[Any]) -> None:
    """Right ids and wrong ones, guesses of others between: nobody warm leaves for them, and the books agree."""
    pager, early, rows = made(file, runs, kind, pages=None)
    for layer, chosen, others, settled in steps:
        n = len(chosen)
        before = pager.evictions, pager.resident
        if early.pays(layer, n):
            early.attend(Stages(rows, [a for a, _ in chosen], [b for _, b in chosen]), layer, n)
        else:
            rows.experts[:n] = [b for _, b in chosen]
        assert (pager.evictions, pager.resident) == before, "a guess takes nobody's place"
        check(pager, file)
        wanted = np.unique(rows.experts[:n]).tolist()
        for at in range(0, len(wanted), pager.room):
            pager.acquire(layer, part := wanted[at : at + pager.room])
            assert (pager.table[layer, part] >= 0).all()
        if settled:
            pager.settle(layer)
        pager.prefetch((layer + 1) % 3, others[:3])
        check(pager, file)
    closed_books(pager)


def test_an_error_of_the_second_stage_leaves_guesses_and_no_more(file: FakeFile) -> None:
    pager, early, rows = made(file, 12)

    def fail() -> None:
        raise RuntimeError("second")

    with pytest.raises(RuntimeError, match="second"):
        early.attend(Stages(rows, [[3, 4]], [[3, 4]], fail), 0, 1)
    check(pager, file)
    pager.acquire(0, [3, 4])
    assert early_counts(pager)["hits"] + early_counts(pager)["late"] == 2
    closed_books(pager)


def test_an_unreadable_guess_is_told_to_who_needs_it(tmp_path: Path) -> None:
    from colibri_lab.errors import PagerError

    file = FakeFile(tmp_path / "experts.bin", experts=8)
    with file.path.open("r+b") as out:
        out.seek(file.extent(1, 2)[0] + 5)
        out.write(bytes([file.content[1, 2, 5] ^ 1]))
    pager, early, rows = made(file, 12)
    early.attend(Stages(rows, [[2, 3]], [[3, 4]], lambda: landed(pager)), 1, 1)
    pager.acquire(1, [3, 4])
    with pytest.raises(PagerError, match="layer 1 expert 2: page 0 is damaged"):
        pager.acquire(1, [2])
    check(pager, file)
    closed_books(pager)
    file.close()
