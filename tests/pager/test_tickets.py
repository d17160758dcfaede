"""Requests that do not wait: what is held stays, what is missing comes page by page, what fails is named and undone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import PagerError
from colibri_lab.events import PageKind
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.types import ABSENT, COMING
from colibri_lab.pager.frames import Frames
from colibri_lab.pager.pager import Pager
from colibri_lab.pager.policies import POLICIES
from colibri_lab.pager.reader import Reader
from colibri_lab.pager.threads import ThreadFlight
from colibri_lab.pager.ticket import Ticket

from .fake import KINDS, FakeFile, check, make_pager


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    file = FakeFile(tmp_path_factory.mktemp("tickets") / "experts.bin", pages=4)
    yield file
    file.close()


def pager_of(file: FakeFile, runs: float, kind: str = "threads", piece: int | None = PAGE, **more: Any) -> Pager:
    return make_pager(file, runs, kind=kind, piece=piece, **more)


class Slow:
    """Reads wait for a permit before each piece."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.permits = threading.Semaphore(0)
        fetch = Reader._fetch

        def wait(reader: Reader, *arguments: Any) -> Any:
            assert self.permits.acquire(timeout=20)
            return fetch(reader, *arguments)

        patch.setattr(Reader, "_fetch", wait)


def there(pager: Pager, layer: int, expert: int, pages: int) -> bool:
    """Waits until exactly so many pages of an expert are told of."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        entries = pager.table[layer, expert]
        if (entries >= 0).sum() == pages:
            return bool((entries[:pages] >= 0).all() and (entries[pages:] == COMING).all())
        time.sleep(0.001)
    return False


def test_pages_come_one_by_one_and_hold(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple] = []
    pager = pager_of(file, 2, on_page=lambda *event: events.append(event))
    slow = Slow(monkeypatch)
    ticket = pager.request(1, [3])
    for pages in range(file.pages):
        assert there(pager, 1, 3, pages)
        slow.permits.release()
    assert there(pager, 1, 3, file.pages) and not events
    pager.release(ticket, waited=7)
    assert [(e[1], e[3], e[5]) for e in events] == [(PageKind.FAULT, 3, 7)] and pager.counters()["faults"] == 1
    check(pager, file)
    slow.permits.release(99)
    one, two = pager.request(1, [3]), pager.request(1, [3])
    assert pager.fits(0, [0]) and not pager.fits(0, [0, 1])
    three = pager.request(0, [0])
    with pytest.raises(LookupError):
        pager.request(2, [0])  # whoever does not ask whether it fits
    pager.release(one)
    pager.release(three)
    assert not pager.fits(2, [0, 1])
    pager.release(pager.request(2, [0]))
    assert (pager.table[1, 3] >= 0).all(), "still held by one of two"
    pager.release(two)
    pager.release(pager.request(2, [1, 2]))
    assert (pager.table[1, 3] == ABSENT).all() and not pager._held
    check(pager, file)
    pager.close()


def test_a_guess_under_way_is_taken_over(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pager = pager_of(file, 8, prefetch=True)
    slow = Slow(monkeypatch)
    pager.prefetch(1, [2])
    flight = pager.ahead.flights[1 * file.experts + 2]
    slow.permits.release(2)
    while flight._pages < 2:
        time.sleep(0.001)
    assert (pager.table[1, 2] == ABSENT).all()
    ticket = pager.request(1, [2])
    assert ticket.taken == {2} and not ticket.reads and there(pager, 1, 2, 2), "what had arrived is told of at once"
    slow.permits.release(2)
    assert there(pager, 1, 2, 4)
    pager.release(ticket)
    counters = pager.counters()
    assert (counters["prefetch_late"], counters["faults"], counters["prefetch_hits"]) == (1, 1, 0)
    check(pager, file)
    pager.close()


def test_a_guess_that_lands_while_it_is_looked_at_is_late_in_every_count(
    file: FakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple] = []
    pager = pager_of(file, 8, prefetch=True, on_page=lambda *event: events.append(event))
    slow = Slow(monkeypatch)
    pager.prefetch(1, [2])
    flight = pager.ahead.flights[1 * file.experts + 2]
    while not flight._turn.locked():  # nobody reads yet: then it could still be called off
        time.sleep(0.001)

    def landing(flight) -> bool:
        slow.permits.release(4)
        flight.wait()
        return False

    monkeypatch.setattr(type(flight), "cancel", landing)
    pager.acquire(1, [2])
    counters = pager.counters()
    assert (counters["prefetch_late"], counters["faults"], counters["prefetch_hits"], counters["hits"]) == (1, 1, 0, 0)
    assert [(e[1], e[3]) for e in events] == [(PageKind.FAULT, 2)]
    check(pager, file)
    pager.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", [PAGE, None])
def test_a_failed_read_is_named_when_given_back(tmp_path: Path, piece: int | None, kind: str) -> None:
    file = FakeFile(tmp_path / "experts.bin", pages=4)
    with file.path.open("r+b") as out:
        out.seek(file.extent(1, 2)[0] + 2 * PAGE + 5)
        out.write(bytes([file.content[1, 2, 2 * PAGE + 5] ^ 1]))
    pager = pager_of(file, 5, kind, piece)
    ticket = pager.request(1, [1, 2, 3])
    other = pager.request(0, [0])
    with pytest.raises(PagerError, match="layer 1 expert 2: page 2 is damaged"):
        pager.release(ticket)
    assert (pager.table[1, 2] == ABSENT).all()
    pager.release(other, ended=False)
    check(pager, file)
    assert not pager._held
    pager.acquire(1, [1, 3])
    check(pager, file)
    pager.close()
    file.close()


def test_what_is_given_up_is_not_read(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pager = pager_of(file, 9)
    slow = Slow(monkeypatch)
    ticket = pager.request(1, [0, 1, 2, 3, 4])
    while sum(flight._turn.locked() for flight in ticket.flights.values()) < 3:
        time.sleep(0.001)  # three readers, three reads under way
    threading.Timer(0.05, slow.permits.release, (99,)).start()
    pager.release(ticket, ended=False)
    assert pager.counters()["faults"] == 3 == pager.resident and (pager.table[1, 3:] == ABSENT).all()
    check(pager, file)
    pager.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 15),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("rp"), st.integers(0, 2), st.permutations(range(5)), st.integers(1, 5)),
            st.tuples(st.just("e"), st.booleans()),
            st.tuples(st.just("b"), st.booleans()),
        ),
        max_size=40,
    ),
)
def test_any_requests(file: FakeFile, policy: str, kind: str, runs: int, actions: list) -> None:
    """Tickets that overlap, guesses between them, tickets given up: what is held is there, and the books agree."""
    pager = pager_of(file, runs, kind, policy=policy, prefetch=True, pin_after=2)
    held: list[Ticket] = []
    for action in actions:
        if action[0] == "r":
            wanted = list(action[2])[: min(action[3], pager.room)]
            while held and not pager.fits(action[1], wanted):
                pager.release(held.pop(0))
            held.append(pager.request(action[1], wanted))
        elif action[0] == "p":
            pager.prefetch(action[1], list(action[2])[: action[3]])
        elif action[0] == "e" and held:
            pager.release(held.pop(0), ended=action[1])
        elif action[0] == "b":
            while held:
                pager.release(held.pop(0))
            pager.begin(0, action[1], 9)
        for ticket in held:
            assert all((pager.table[ticket.layer, e] != ABSENT).all() for e in ticket.wanted)
    while held:
        ticket = held.pop(0)
        for flight in ticket.flights.values():
            flight.wait()
        for expert in ticket.wanted:
            frames = pager.table[ticket.layer, expert]
            assert (pager.frames.array[frames].reshape(-1) == file.content[ticket.layer, expert]).all()
        pager.release(ticket)
    assert not pager._held
    check(pager, file)
    pager.close()
    p = pager.counters()
    assert p["bytes_read"] == file.pages * PAGE * (p["faults"] + p["prefetch_hits"] + p["prefetch_wasted"])
    assert p["policy_hits"] + p["pin_hits"] + p["prefetch_hits"] == p["hits"]


def test_publishing_meets_the_reader_at_any_moment(file: FakeFile) -> None:
    """Whoever comes first, the reader or the one who asks for the entries: all pages are told of."""
    reader, frames = Reader(file, PAGE), Frames(file.pages, 2, 2)
    for i in range(200):
        entries = np.full(4, ABSENT, np.int32)
        flight = ThreadFlight(0, i % 5, 1, frames, entries)
        thread = threading.Thread(target=flight.fly, args=(reader,))
        thread.start()
        time.sleep(i * 2e-6)
        flight.publish()
        thread.join()
        assert entries.tolist() == [4, 5, 6, 7]
    reader.close()
