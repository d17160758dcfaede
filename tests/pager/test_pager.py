"""The pager over a file of random experts: what is asked for is there, under any budget, and nothing else is read."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import ConfigError, PagerError
from colibri_lab.events import PageKind
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.types import ABSENT
from colibri_lab.pager.frames import Frames
from colibri_lab.pager.policy import LRU

from .fake import KINDS, FakeFile, check, make_pager, transfer_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFile]:
    file = FakeFile(tmp_path_factory.mktemp("pages") / "experts.bin")
    yield file
    file.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 15),
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4), min_size=1, max_size=5)),
            st.integers(2, 16),
        ),
        max_size=25,
    ),
)
def test_any_requests_under_any_budgets(file: FakeFile, kind: str, runs: int, actions: list) -> None:
    """Against a model in ten lines: same faults, hits and evictions; contents right; budgets change on the way."""
    pager = make_pager(file, runs, kind=kind)
    order: OrderedDict[tuple[int, int], None] = OrderedDict()
    faults = hits = evictions = 0
    runs = min(runs, 15)
    for action in actions:
        if isinstance(action, int):
            pager.resize(action * file.pages * PAGE)
            runs = min(action, 15)
            while len(order) > runs:
                order.popitem(last=False)
                evictions += 1
        else:
            layer, wanted = action[0], sorted(action[1])[:runs]
            pager.acquire(layer, wanted)
            missing = [e for e in wanted if (layer, e) not in order]
            for e in wanted:
                if (layer, e) in order:
                    order.move_to_end((layer, e))
            for e in missing:
                if len(order) + missing.index(e) >= runs:
                    order.popitem(last=False)
                    evictions += 1
            order.update(dict.fromkeys((layer, e) for e in missing))
            faults, hits = faults + len(missing), hits + len(wanted) - len(missing)
            assert (pager.table[layer, wanted] >= 0).all()
        check(pager, file)
    counters = pager.counters()
    assert (counters["faults"], counters["hits"], counters["evictions"]) == (faults, hits, evictions)
    assert counters["bytes_read"] == faults * file.pages * PAGE
    pager.close()


def test_least_budget_is_named(file: FakeFile) -> None:
    with pytest.raises(
        ConfigError, match=r"0\.1\d+ MiB is too little .* needs 3 experts at once, so the least is 0\.375 MiB"
    ):
        make_pager(file, 1.5, top_k=3)
    pager = make_pager(file, 3.9, top_k=3)
    assert (pager.room, pager.least) == (3, 3 * 2 * PAGE)
    with pytest.raises(ConfigError):
        pager.resize(pager.least - 1)
    pager.resize(10**9)
    assert pager.counters()["budget_bytes"] == pager.most == 15 * 2 * PAGE
    pager.close()


def test_events_tell_faults_and_evictions(file: FakeFile) -> None:
    events: list[tuple] = []
    pager = make_pager(file, 2, on_page=lambda *event: events.append(event))
    pager.step = 7
    pager.acquire(0, [0, 1])
    pager.acquire(1, [4])
    kinds = [(kind, layer, expert, pages, step) for _, kind, layer, expert, pages, _, step in events]
    assert kinds == [
        (PageKind.FAULT, 0, 0, 2, 7),
        (PageKind.FAULT, 0, 1, 2, 7),
        (PageKind.EVICT, 0, 0, 2, 7),
        (PageKind.FAULT, 1, 4, 2, 7),
    ]
    assert all(wait > 0 for _, kind, _, _, _, wait, _ in events if kind == PageKind.FAULT)
    assert pager.counters()["io_wait_s"] > 0
    pager.close()


def test_a_foreign_policy_decides(file: FakeFile) -> None:
    class Newest:
        """Throws out what was read last."""

        def __init__(self) -> None:
            self.order: list[int] = []

        def hit(self, key: int) -> None:
            pass

        def admit(self, key: int) -> None:
            self.order.append(key)

        def victim(self, busy: Container[int]) -> int:
            return next(key for key in reversed(self.order) if key not in busy)

        def forget(self, key: int) -> None:
            self.order.remove(key)

    pager = make_pager(file, 2, policy=Newest())
    for expert in (0, 1, 2, 3):
        pager.acquire(0, [expert])
    assert (pager.table[0, :, 0] >= 0).tolist() == [True, False, False, True, False]
    pager.close()


@pytest.mark.parametrize(
    ("gives", "why"),
    [(14, "14, which is no expert in memory"), (1, "1, which is in use"), (-1, "-1, which is no"),
     (99, "99, which is no"), (None, "None, which is no"), (0.0, r"0\.0, which is no")],
)  # fmt: skip
def test_a_policy_that_frees_nothing_is_named_and_corrupts_nothing(file: FakeFile, gives: Any, why: str) -> None:
    policy = LRU()
    pager = make_pager(file, 2, policy)
    pager.acquire(0, [0, 1])
    policy.victim = lambda busy: gives  # type: ignore[method-assign]
    with pytest.raises(PagerError, match=f"eviction_policy LRU: victim\\(\\) gave {why}"):
        pager.acquire(0, [1, 2])
    check(pager, file)
    del policy.victim  # type: ignore[method-assign]
    pager.acquire(0, [1, 2])
    check(pager, file)
    pager.close()


def test_shrinking_gives_memory_back(tmp_path: Path) -> None:
    frames = Frames(pages=64, most=16, capacity=16)  # 4 MiB a run
    for _ in range(16):
        frames.view(frames.take())[:] = b"\1" * frames.run_bytes
    full = psutil.Process().memory_info().rss
    frames.resize(2, used={0, 1})
    assert full - psutil.Process().memory_info().rss > 50 << 20
    assert frames.view(0)[0] == 1 and frames.free == 0
    frames.resize(3, used={0, 1})
    assert frames.take() == 2


def test_evicted_frames_are_poisoned(file: FakeFile) -> None:
    pager = make_pager(file, 2)
    pager.acquire(0, [0, 1])
    run = int(pager.table[0, 0, 0]) // file.pages
    pager._evict(())
    assert np.isnan(np.frombuffer(pager.frames.view(run), np.float16)).all()
    assert not np.isnan(np.frombuffer(pager.frames.view(1 - run), np.float16)).all()
    pager.close()


@pytest.mark.parametrize(("direct", "kind"), [(True, "queue"), (True, "threads"), (False, "threads")])
def test_damage_is_named_and_leaves_the_pager_usable(
    tmp_path: Path, direct: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    file = FakeFile(tmp_path / "experts.bin")
    with file.path.open("r+b") as out:
        out.seek(file.extent(1, 2)[0] + PAGE + 100)
        out.write(bytes([file.content[1, 2, PAGE + 100] ^ 1]))
    pager = make_pager(file, 4, kind=kind)
    with pytest.raises(PagerError, match=r"experts\.bin: layer 1 expert 2: page 1 is damaged"):
        pager.acquire(1, [1, 2, 3])
    check(pager, file)
    pager.acquire(1, [1, 3])
    check(pager, file)
    pager.close()
    file.close()


@pytest.mark.parametrize(("direct", "kind"), [(True, "queue"), (True, "threads"), (False, "threads")])
@pytest.mark.parametrize("lost", [1, PAGE, 3 * PAGE + 17])
def test_short_file_is_named(
    tmp_path: Path, direct: bool, kind: str, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    file = FakeFile(tmp_path / "experts.bin", layers=1)
    os.truncate(file.path, file.path.stat().st_size - lost)
    pager = make_pager(file, 4, kind=kind)
    with pytest.raises(PagerError, match=r"layer 0 expert 4: the file ends"):
        pager.acquire(0, [4])
    pager.acquire(0, [0, 1])
    check(pager, file)
    pager.close()
    file.close()


def test_a_file_replaced_under_us_stays_ours(tmp_path: Path) -> None:
    file = FakeFile(tmp_path / "experts.bin")
    other = FakeFile(tmp_path / "other.bin")
    other.path.write_bytes(b"\7" * other.path.stat().st_size)
    os.replace(other.path, file.path)
    pager = make_pager(file, 4)  # opened after the swap: still the old contents
    pager.acquire(2, [0, 1, 2])
    check(pager, file)
    pager.close()


def test_offsets_past_4_gib(tmp_path: Path) -> None:
    class Sparse(FakeFile):
        def extent(self, layer: int, expert: int) -> tuple[int, int]:
            return [PAGE, (1 << 31) + PAGE, (1 << 32) + 3 * PAGE][expert], self.pages * PAGE

    file = Sparse(tmp_path / "sparse.bin", layers=1, experts=3)
    with file.path.open("r+b") as out:
        for expert in range(3):
            out.seek(file.extent(0, expert)[0])
            out.write(file.content[0, expert].tobytes())
    pager = make_pager(file, 3)
    pager.acquire(0, [0, 1, 2])
    check(pager, file)
    pager.close()
    file.close()


def test_a_budget_is_honest_about_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffered reads, too, leave nothing behind: the pages read are not in the page cache afterwards."""
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: dropped.append((offset, size, advice)))
    file = FakeFile(tmp_path / "experts.bin")
    pager = make_pager(file, 4)
    pager.acquire(1, [2])
    assert not pager.direct and (*file.extent(1, 2), os.POSIX_FADV_DONTNEED) in dropped
    pager.close()
    file.close()


def test_threads_end_with_close(file: FakeFile) -> None:
    before = set(threading.enumerate())
    transfer, frames = transfer_of(file, "threads"), Frames(file.pages, 5, 5)
    transfer.serve(frames, np.full((1, 5, file.pages), ABSENT, np.int32))
    transfer.load([transfer.read(0, e, frames.take()) for e in range(5)])
    assert any(t.name == "colibri-reader" for t in threading.enumerate())
    transfer.close()
    transfer.close()
    assert set(threading.enumerate()) == before


def test_lru_is_constant_time_in_the_number_of_experts() -> None:
    policy = LRU()
    for key in range(100_000):
        policy.admit(key)
    policy.hit(0)
    assert [policy.victim({1, 2}) for _ in range(3)] == [3, 3, 3]
