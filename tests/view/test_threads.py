"""The picture of what threads did, from events made by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from colibri_lab.view.threads import BARRIER, READ, SHARED, WARP, WRITE, Threads, columns
from tests.view.test_report import Wellformed

EVENT = np.dtype([("block", "u4"), ("at", "u4"), ("thread", "u2"), ("phase", "u2"), ("line", "u2"), ("kind", "u1"),
                  ("array", "u1")])  # fmt: skip


def made(rows: list[tuple[int, int, int, int, int]], block: int = 0) -> np.ndarray:
    """(thread, phase, kind, array, element) each."""
    events = np.zeros(len(rows), EVENT)
    for event, (thread, phase, kind, array, at) in zip(events, rows, strict=True):
        event["thread"], event["phase"], event["kind"], event["array"], event["at"] = thread, phase, kind, array, at
        event["block"], event["line"] = block, 7 if kind == BARRIER else 0
    return events


@dataclass
class Told:
    events: np.ndarray
    threads: int = 64
    kernel: str = "some<kernel>"
    met: tuple = ()

    def name(self, array: int) -> str:
        return "shared" if array == SHARED else "xy"[array]

    def elements(self):
        rows = self.events[self.events["kind"] <= WRITE]
        return rows, rows["at"].astype(np.int64)

    def conflicts(self):
        return self.met


def test_threads_stand_in_line_where_they_meet() -> None:
    """Thread 0 reads twice before its warp meets, thread 1 once; thread 32 goes on alone until the barrier."""
    rows = [(0, 0, READ, 0, 0), (0, 0, READ, 0, 2), (1, 0, READ, 0, 1), (0, 0, WARP, 254, 0), (1, 0, WARP, 254, 0),
            (0, 0, WRITE, SHARED, 0), (32, 0, READ, 0, 5), (0, 0, BARRIER, 254, 0), (1, 0, BARRIER, 254, 0),
            (32, 0, BARRIER, 254, 0), (1, 1, WRITE, 1, 1)]  # fmt: skip
    column, ends = columns(made(rows))
    assert column.tolist() == [0, 1, 0, 2, 2, 3, 0, 4, 4, 4, 5] and ends == [5, 7]


def test_a_picture() -> None:
    rows = [(t, 0, READ, 0, t) for t in range(64)] + [(t, 0, BARRIER, 254, 0) for t in range(64)]
    rows += [(t, 1, WRITE, 1, 63 - t) for t in range(64)]
    shown = Threads(Told(made(rows)))
    html = shown._repr_html_()
    Wellformed(html)
    assert "some&lt;kernel&gt;, block 0" in html and "no two meet without a barrier between" in html
    assert "reads memory 64" in html and "writes memory 64" in html and "barriers 1 (line)" in html
    assert "barrier, line 7" in html and "0 to 63, read" in html and "0 to 63, written" in html
    assert "meets its warp" not in html and "192 events" in repr(shown)


def test_a_conflict_is_said() -> None:
    @dataclass
    class Met:
        block: int = 0

        def __str__(self) -> str:
            return "thread 0 & thread 32"

    html = Threads(Told(made([(0, 0, WRITE, SHARED, 0)]), met=(Met(1), Met())))._repr_html_()
    Wellformed(html)
    assert html.count("thread 0 &amp; thread 32") == 2


@pytest.mark.parametrize("threads", [1, 32, 1024])
def test_odd_sizes(threads: int) -> None:
    rows = [(t, 0, READ, 0, 3000 * t) for t in range(threads)]
    html = Threads(Told(made(rows), threads))._repr_html_()
    Wellformed(html)
    assert len(html) < 400_000


def test_a_block_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"some<kernel>: block 3 did nothing"):
        Threads(Told(made([(0, 0, READ, 0, 0)])), block=3)
