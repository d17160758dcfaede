"""Reads in the system's queue: what is needed comes first, what waits can be called off, whoever looks is told."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import PagerError
from colibri_lab.ops.build import KernelError
from colibri_lab.ops.cpu import open_library
from colibri_lab.ops.isa import available
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.types import ABSENT, COMING
from colibri_lab.pager import queue as queue_module
from colibri_lab.pager import transfer as transfer_module
from colibri_lab.pager.frames import Frames
from colibri_lab.pager.queue import QueueTransfer
from colibri_lab.pager.reader import Reader
from colibri_lab.pager.reading import open_transfer
from colibri_lab.pager.threads import ThreadTransfer

from .fake import FakeFile

READING = 2  # a slot's state in kernels/cpu/reader.c


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    file = FakeFile(tmp_path_factory.mktemp("queue") / "experts.bin", pages=5)
    yield file
    file.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    """A read takes a millisecond and more, so that several are under way for sure."""
    file = FakeFile(tmp_path_factory.mktemp("large") / "experts.bin", pages=32)
    yield file
    file.close()


class Opened:
    """A queue with frames for all experts and a page table."""

    def __init__(self, file: FakeFile, depth: int, piece: int | None = None) -> None:
        made = QueueTransfer.open(Reader(file, piece), depth)
        assert made is not None
        self.transfer, self.file = made, file
        self.frames = Frames(file.pages, file.layers * file.experts, file.layers * file.experts, poison=True)
        self.table = np.full((file.layers, file.experts, file.pages), ABSENT, np.int32)
        made.serve(self.frames, self.table)

    def whole(self, layer: int, expert: int) -> bool:
        """Whether the page table leads to the expert's own bytes."""
        frames = self.table[layer, expert]
        return bool(
            (frames >= 0).all() and (self.frames.array[frames].reshape(-1) == self.file.content[layer, expert]).all()
        )


def checked(file: FakeFile, depth: int) -> Opened:
    """No more checksums, which take time."""
    made = Opened(file, depth)
    for at in range(15):
        made.transfer.load([made.transfer.read(at // 5, at % 5, 0)])
    made.table[:] = ABSENT
    return made


def one_at_a_time(file: FakeFile) -> Opened:
    """A call lets at most one more read begin."""
    return checked(file, 1)


@pytest.mark.parametrize("level", available())
@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=700), st.integers(0, 17))
def test_crc32_is_zlibs(level: str, data: bytes, skip: int) -> None:
    _, library = open_library(level)
    whole = np.frombuffer(b"x" * skip + data, np.uint8)
    assert library.colibri_crc32(whole.ctypes.data + skip, len(data)) == zlib.crc32(data)


@pytest.mark.parametrize("piece", [None, PAGE, 2 * PAGE])
def test_pages_reach_table_and_frames(file: FakeFile, piece: int | None) -> None:
    made = Opened(file, 2, piece)
    flights = [made.transfer.read(layer, expert, layer * 5 + expert) for layer in range(3) for expert in range(5)]
    made.transfer.load(flights)
    assert all(made.whole(layer, expert) for layer in range(3) for expert in range(5))
    assert all(flight.landed and flight.error is None and not flight.cancel() for flight in flights)
    late = made.transfer.guess(0, 0, 0)
    made.transfer.close()
    made.transfer.close()
    late.publish()
    assert late.landed and "layer 0 expert 0: cannot be read" in str(late.error) and not late.cancel()


def test_what_is_needed_passes_guesses_and_what_waits_can_be_called_off(file: FakeFile) -> None:
    made = one_at_a_time(file)
    transfer = made.transfer
    first = transfer.read(0, 0, 0)
    guesses = [transfer.guess(1 + at // 5, at % 5, 5 + at) for at in range(10)]
    assert guesses[9].cancel() and guesses[9].cancel() and guesses[9].cancelled and not first.cancel()
    needed = transfer.read(0, 1, 1)
    assert guesses[7].cancel() and (made.table[1:] == ABSENT).all(), "nobody is told of guesses"
    needed.wait()
    assert first.landed and made.whole(0, 0) and made.whole(0, 1)
    assert guesses[8].cancel() and guesses[6].cancel() and not guesses[0].cancel()
    for guess in guesses[:6]:
        guess.wait()
        guess.publish()
    assert all(made.whole(1, expert) for expert in range(5)) and made.whole(2, 0)
    assert (made.table[2, 1:] == ABSENT).all() and not made.frames.array[11 * file.pages :].any(), "nothing was read"
    transfer.close()


def test_no_guess_shares_the_disk_with_what_is_needed(file: FakeFile) -> None:
    made = Opened(file, 2)
    transfer = made.transfer
    for at in range(50):
        needed, guess = transfer.read(0, at % 5, at % 5), transfer.guess(1, at % 5, 5 + at % 5)
        assert guess.cancel() or needed.landed, "it waits, though two reads may be under way"
        transfer.load([needed])
        if not guess.cancelled:
            guess.wait()
    made.table[:] = ABSENT
    urgent = [transfer.guess(2, expert, 10 + expert) for expert in range(5)]
    urgent[4].publish()  # needed from now on, whatever it was
    urgent[4].wait()
    assert made.whole(2, 4)
    for guess in urgent[:4]:
        guess.wait()  # they begin when it has come
        guess.publish()
    assert all(made.whole(2, expert) for expert in range(4))
    transfer.close()


@pytest.mark.parametrize("kind", ["queue", "threads"])
def test_the_time_of_reading_is_told(file: FakeFile, kind: str) -> None:
    begin = time.perf_counter_ns()
    made = Opened(file, 2)
    transfer: Any = made.transfer
    if kind == "threads":
        transfer = ThreadTransfer(Reader(file), 2)
        transfer.serve(made.frames, made.table)
    assert transfer.reading_ns() == 0
    told = []
    for at in range(6):
        transfer.load([transfer.read(at % 3, expert, expert) for expert in range(2)])
        told.append(transfer.reading_ns())
    assert told == sorted(set(told)) and told[-1] <= time.perf_counter_ns() - begin
    assert transfer.reading_ns() == told[-1], "nothing is under way"
    transfer.close()
    made.transfer.close()


def test_a_guess_that_is_needed_while_it_waits_passes_others_and_can_be_called_off(file: FakeFile) -> None:
    made = one_at_a_time(file)
    transfer = made.transfer
    first = transfer.read(0, 0, 0)
    guesses = [transfer.guess(1 + at // 5, at % 5, 5 + at) for at in range(10)]
    guesses[9].publish()
    guesses[8].publish()
    assert guesses[8].cancel(), "nobody reads it any more"
    again = transfer.read(0, 3, guesses[8].run)  # its frames are another's
    guesses[9].wait()
    assert first.landed and made.whole(2, 4) and guesses[7].cancel(), "needed before the other guesses"
    again.wait()
    for guess in guesses[:7]:
        guess.wait()
    assert made.whole(0, 3) and not made.frames.array[12 * file.pages : 13 * file.pages].any(), "and nothing more"
    transfer.close()


def test_publishing_meets_the_disk_at_any_moment(file: FakeFile) -> None:
    made = Opened(file, 4, PAGE)
    for i in range(200):
        layer, expert = i % 3, i % 5
        made.table[:] = ABSENT
        flight = made.transfer.guess(layer, expert, i % 15)
        time.sleep(i * 1e-6)
        flight.publish()
        assert set(made.table[layer, expert].tolist()) <= {COMING, *range(i % 15 * 5, i % 15 * 5 + 5)}
        flight.wait()
        assert made.whole(layer, expert)
    made.transfer.close()


def test_others_look_while_one_waits(file: FakeFile) -> None:
    """Kernels look from threads of their own, without Python's lock."""
    made = Opened(file, 3, PAGE)
    library, end = made.transfer._library, threading.Event()

    def look() -> None:
        while not end.is_set():
            library.colibri_reader_poll(made.transfer._handle)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        made.table[:] = ABSENT
        flights = [made.transfer.read(turn % 3, expert, expert) for expert in range(5)]
        made.transfer.load(flights)
        assert all(made.whole(turn % 3, expert) for expert in range(5))
    end.set()
    for thread in threads:
        thread.join()
    made.transfer.close()


def test_a_read_that_cannot_begin_fails_as_one_that_did(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Opened(file, 2)
    monkeypatch.setattr(file, "extent", lambda layer, expert: (PAGE, 3 * PAGE))
    flight = made.transfer.guess(1, 2, 0)
    flight.publish()
    assert flight.landed and not flight.cancel()
    with pytest.raises(
        PagerError, match="layer 1 expert 2: 196608 bytes, where experts have 327680; convert the model again"
    ):
        made.transfer.load([made.transfer.read(1, 2, 0)])
    monkeypatch.undo()
    os.close(made.transfer._reader._fd)
    made.transfer._reader._fd = os.open(os.devnull, os.O_WRONLY)  # the number is taken again, by what cannot be read
    with pytest.raises(PagerError, match="layer 1 expert 3: cannot be read: Bad file descriptor"):
        made.transfer.load([made.transfer.read(1, 3, 0)])
    assert (made.table[1, 3] == ABSENT).all()
    made.transfer.close()
    with pytest.raises(PagerError, match="layer 1 expert 3: cannot be read: Bad file descriptor"):
        made.transfer.load([made.transfer.read(1, 3, 0)])


def test_a_forked_child_reads_for_itself(file: FakeFile) -> None:
    made = Opened(file, 1)
    guesses = [made.transfer.guess(1, expert, expert) for expert in range(3)]
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            made.transfer.load([made.transfer.read(0, 1, 9)])
            for guess in guesses:
                guess.wait()
                guess.publish()
            fine = made.whole(0, 1) and all(made.whole(1, expert) for expert in range(3))
            made.transfer.close()
            os._exit(0 if fine else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for guess in guesses:
        guess.wait()
        guess.publish()
    assert all(made.whole(1, expert) for expert in range(3))
    made.transfer.close()


def test_few_guesses_are_read_at_a_time(large: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a wrong one that has not begun costs nothing, and what is needed waits for few."""
    monkeypatch.setattr(transfer_module, "GUESS_BYTES", 2 * large.pages * PAGE + 1)
    made = checked(large, 10)
    guesses, seen = [], [0]
    for at in range(10):
        guesses.append(made.transfer.guess(at // 5, at % 5, at))
        seen.append(list(made.transfer._states).count(READING))
    while not all(guess.landed for guess in guesses):
        seen.append(list(made.transfer._states).count(READING))
    assert max(seen) <= 2, seen
    made.transfer.load([made.transfer.read(2, expert, 10 + expert) for expert in range(5)])
    for guess in guesses:
        guess.publish()
    assert all(made.whole(layer, expert) for layer in range(3) for expert in range(5))
    made.transfer.close()


def test_a_queue_serves_the_next_reader(large: FakeFile) -> None:
    """Whether it was closed idle or in the midst of reads, whose ends the next reader never sees."""
    for at in range(6):
        made = checked(large, 3)
        for run in range(3 * (at % 2)):
            made.transfer.read(0, run, run)
        made.transfer.close()
        made = Opened(large, 3)
        made.transfer.load([made.transfer.read(at % 3, at % 5, 0)])
        assert made.whole(at % 3, at % 5)
        made.transfer.close()


def test_a_forked_child_does_not_take_its_parents_unused_queue(file: FakeFile) -> None:
    Opened(file, 3).transfer.close()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            made = Opened(file, 3)
            made.transfer.load([made.transfer.read(0, 1, 9)])
            os._exit(0 if made.whole(0, 1) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_where_there_is_no_queue(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(**how: Any) -> type:
        made = open_transfer(file, 3, None, **({"kernels": True} | how))
        made.close()
        return type(made)

    assert kind() is QueueTransfer and kind(kernels=False) is ThreadTransfer
    with monkeypatch.context() as patch:
        patch.delattr(os, "O_DIRECT")
        assert kind() is ThreadTransfer
    with monkeypatch.context() as patch:
        patch.setattr(open_library()[1], "colibri_reader_open", lambda *arguments: None)
        assert kind() is ThreadTransfer, "no more queues on this system"

    def none() -> Any:
        raise KernelError("no C compiler")

    monkeypatch.setattr(queue_module, "open_library", none)
    assert kind() is ThreadTransfer


def test_a_file_larger_than_a_read(tmp_path: Path) -> None:
    """An expert of more pages than a read has pieces: pieces grow."""
    file = FakeFile(tmp_path / "experts.bin", layers=1, experts=2, pages=70)
    made = Opened(file, 4, PAGE)
    made.transfer.load([made.transfer.read(0, expert, expert) for expert in range(2)])
    assert made.whole(0, 0) and made.whole(0, 1)
    made.transfer.close()
    file.close()
