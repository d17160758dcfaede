"""Reading ahead: a guess never costs a warm expert, every guess is accounted for, no reader writes where it may not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import PagerError
from colibri_lab.events import PageKind
from colibri_lab.ops.layout import PAGE
from colibri_lab.pager.pager import Pager
from colibri_lab.pager.policies import POLICIES
from colibri_lab.pager.prefetchers import History, Neighbour
from colibri_lab.pager.reader import Reader

from .fake import KINDS, FakeFile, check, make_pager


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    file = FakeFile(tmp_path_factory.mktemp("ahead") / "experts.bin")
    yield file
    file.close()


class Gate:
    """Readers that read ahead wait here until they are let through."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, self.begun = threading.Event(), threading.Semaphore(0)
        read = Reader.read

        def slow(reader: Reader, job: object) -> None:
            if threading.current_thread().name == "colibri-ahead":
                self.begun.release()
                assert self.open.wait(20)
            read(reader, job)  # type: ignore[arg-type]

        patch.setattr(Reader, "read", slow)


def landed(pager: Pager) -> None:
    for flight in pager.ahead.flights.values():
        flight.wait()


def counts(pager: Pager) -> dict[str, float]:
    return {k.removeprefix("prefetch_"): v for k, v in pager.counters().items() if k.startswith("prefetch_")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_guess_that_landed_is_a_hit(file: FakeFile, kind: str) -> None:
    events: list[tuple] = []
    pager = make_pager(file, 8, kind=kind, prefetch=True, on_page=lambda *e: events.append(e))
    pager.prefetch(1, [3, 4])
    landed(pager)
    assert (pager.table[1] < 0).all(), "nothing is in the table before it is asked for"
    pager.acquire(1, [3])
    assert [(e[1], e[3], e[5]) for e in events] == [(PageKind.PREFETCH, 3, 0)]
    c = pager.counters()
    assert (c["hits"], c["faults"], c["prefetch_hits"], c["policy_hits"]) == (1, 0, 1, 0)
    assert c["bytes_read"] == c["prefetch_bytes"] == 2 * PAGE and c["io_wait_s"] == 0
    check(pager, file)
    pager.acquire(0, [0, 1, 2])
    pager.prefetch(2, [0, 1])  # no room for two more guesses: the old one goes, unused
    landed(pager)
    assert counts(pager)["wasted"] == 1 and counts(pager)["issued"] == 4
    assert [e[2:4] for e in events if e[1] == PageKind.WASTE] == [(1, 4)]
    check(pager, file)
    pager.close()
    assert counts(pager)["wasted"] == 3


def test_late_and_cancelled(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    pager = make_pager(file, 12, kind="threads", prefetch=True)
    pager.ahead.most = 5
    pager.prefetch(1, [0, 1, 2, 3])
    for _ in range(3):  # three reader threads have begun; the fourth guess is queued
        assert gate.begun.acquire(timeout=20)
    threading.Timer(0.05, gate.open.set).start()
    pager.acquire(1, [0, 3])  # one is being read: waited for; one is queued: read at once
    assert counts(pager)["late"] == 2 and pager.counters()["faults"] == 2
    assert pager.counters()["io_wait_s"] > 0.01 and pager.counters()["prefetch_bytes"] == 2 * PAGE
    landed(pager)
    gate.open.clear()
    while gate.begun.acquire(blocking=False):
        continue
    pager.ahead.drain()
    pager.prefetch(2, [0, 1, 2, 3, 4])
    for _ in range(3):
        assert gate.begun.acquire(timeout=20)
    pager.acquire(2, [0]) if gate.open.set() else None
    pager.settle(2)
    check(pager, file)
    pager.close()
    c = counts(pager)
    assert c["issued"] == c["hits"] + c["late"] + c["wasted"] + c["cancelled"] + c["failed"]


def test_what_is_known_to_be_useless_is_not_read(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    pager = make_pager(file, 12, kind="threads", prefetch=True)
    pager.ahead.most = 5
    pager.prefetch(2, [0, 1, 2, 3, 4])
    for _ in range(3):
        assert gate.begun.acquire(timeout=20)
    pager.settle(1)  # another layer's business
    assert counts(pager)["cancelled"] == 0
    pager.settle(2)
    assert counts(pager)["cancelled"] == 2 and len(pager.ahead.flights) == 3
    gate.open.set()
    pager.resize(2 * file.pages * PAGE)  # waits for the readers before frames move
    assert counts(pager)["wasted"] == 3 and not pager.ahead.flights
    assert pager.ahead.most == 0
    pager.prefetch(1, [0])
    assert counts(pager)["issued"] == 5, "with room for one token only, nothing is read ahead"
    pager.close()


def test_guesses_have_few_frames(tmp_path: Path) -> None:
    pager = make_pager(FakeFile(tmp_path / "experts", layers=4, experts=40), 96, top_k=2)
    kept = []
    for wanted in (0, 1, 4, 100):
        pager.guess(wanted)
        kept.append(pager.ahead.most)
        assert pager._keep == 96 - kept[-1]
    assert kept == [0, 2, 4, 6], "what was wanted, at least one token's experts, at most a sixteenth"
    pager.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreadable_guess_hurts_nobody_until_it_is_needed(tmp_path: Path, kind: str) -> None:
    file = FakeFile(tmp_path / "experts.bin")
    with file.path.open("r+b") as out:
        out.seek(file.extent(1, 2)[0] + 5)
        out.write(bytes([file.content[1, 2, 5] ^ 1]))
    pager = make_pager(file, 8, kind=kind, prefetch=True)
    pager.prefetch(1, [2])
    landed(pager)
    pager.ahead.drain()
    assert counts(pager)["failed"] == 1
    pager.prefetch(1, [2])
    landed(pager)
    with pytest.raises(PagerError, match="layer 1 expert 2: page 0 is damaged"):
        pager.acquire(1, [2, 3])
    check(pager, file)
    pager.acquire(1, [3, 4])
    check(pager, file)
    with pytest.raises(PagerError, match="expert 5 of layer 1: there are 5"):
        pager.prefetch(1, [5])
    pager.close()
    file.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 15),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("ap"), st.integers(0, 2), st.permutations(range(5)), st.integers(1, 5)),
            st.tuples(st.just("s"), st.integers(0, 2)),
            st.tuples(st.just("b"), st.booleans()),
            st.integers(2, 16),
        ),
        max_size=40,
    ),
)
def test_any_guesses(file: FakeFile, policy: str, kind: str, runs: int, actions: list) -> None:
    pager = make_pager(file, runs, policy, kind=kind, prefetch=True, pin_after=2)
    for action in actions:
        if isinstance(action, int):
            pager.resize(action * file.pages * PAGE)
        elif action[0] == "a":
            wanted = list(action[2])[: min(action[3], pager.room)]
            pager.acquire(action[1], wanted)
            assert (pager.table[action[1], wanted] >= 0).all()
        elif action[0] == "p":
            before = pager.evictions, pager.resident
            pager.prefetch(action[1], list(action[2])[: action[3]])
            assert (pager.evictions, pager.resident) == before, "a guess takes nobody's place"
        elif action[0] == "s":
            pager.settle(action[1])
        else:
            pager.begin(0, action[1], 9)
        assert pager.room >= 2
        check(pager, file)
    pager.close()
    c = counts(pager)
    assert c["issued"] == c["hits"] + c["late"] + c["wasted"] + c["cancelled"] + c["failed"]
    p = pager.counters()
    for name in ("faults", "hits", "prefetch_hits"):
        assert p[f"prefill_{name}"] + p[f"decode_{name}"] == p[name]
    assert p["policy_hits"] + p["pin_hits"] + p["prefetch_hits"] == p["hits"]


def test_neighbours_are_the_nearest_in_the_file() -> None:
    guess = Neighbour(6).guess(3, [[1, 4]], [1, 4])
    assert guess == (3, [2, 0, 5, 3])
    assert Neighbour(6).guess(3, [[1, 4]], []) == (3, [])


def test_history_counts_what_followed() -> None:
    history = History([True, False, True], experts=5, top_k=2)
    assert history.guess(0, [[1, 2]], []) == (2, [])
    assert history.guess(2, [[4, 3]], []) == (0, [])
    assert history.guess(0, [[2, 0]], []) == (2, [3, 4])  # expert 2 led to 3 and 4
    assert history.guess(2, [[3, 1]], []) == (0, [0, 2])  # after the last layer comes the first
    target, experts = history.guess(0, [[2, 1], [1, 0]], [])  # two rows: more of what follows often
    assert target == 2 and experts == [3, 4, 1]


def test_threads_end_with_close(file: FakeFile) -> None:
    before = set(threading.enumerate())
    pager = make_pager(file, 9, kind="threads", prefetch=True)
    pager.prefetch(0, range(5))
    assert any(t.name == "colibri-ahead" for t in threading.enumerate())
    pager.close()
    assert set(threading.enumerate()) == before
    assert np.isnan(np.frombuffer(pager.frames.view(0), np.float16)).all(), "given back, so poisoned"
