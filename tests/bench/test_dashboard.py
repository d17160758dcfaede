"""`bench dashboard`: a kernel, a front end that receives, and what an update costs there."""

from __future__ import annotations

import os

import pytest

from colibri_lab.bench import dashboard, main
from colibri_lab.bench.frontend import Frontend


def test_updates_are_counted_where_they_arrive_and_decode_is_compared() -> None:
    plan = dashboard.Plan("nano", rounds=2, block=0.5, seconds=1.5, wide="nano", pictures=4)
    result = dashboard.run(plan)
    rows = {(row.what.partition(" at ")[0], row.unit): row for row in result.rows}
    for kind in ("slow", "fast", "what-if open"):
        assert 0 < rows[f"{kind}: an update", "ms of CPU"].value < 100
        assert 1000 < rows[f"{kind}: an update", "bytes"].value < 12_000
    (work,) = (row.value for row in result.rows if row.what.startswith("one after the other: an update"))
    (page,) = (row.value for row in result.rows if row.what.startswith("a page of memory after"))
    (rested,) = (row.value for row in result.rows if row.what.startswith("after 125 ms of nothing"))
    assert 0 < work < 100 and 0 < rested < 100 and page > 0
    assert any(f"cost {rested / work:.1f} times as much" in note for note in result.notes)
    assert (page > 500) == any("takes memory away" in reason for reason in result.reasons)
    assert [row.limit for row in result.rows].count(1.5) == 5, "the bar stands beside each time"
    speed = rows["decode with the board", "tokens/s"]
    assert speed.value > 0 and speed.peer == "without" and speed.ratio == pytest.approx(speed.value / speed.peer_value)
    assert rows["an update while nano decodes", "ms of CPU"].value > 0
    for what in ("step", "jump"):
        (took,) = (row.value for row in result.rows if row.what.startswith(f"a {what} on the time line"))
        assert 0 < took < 1000
    assert any("frames arrived" in note and "ticker" in note for note in result.notes)


def test_a_front_end_gets_results_errors_and_every_message_of_a_board() -> None:
    with Frontend() as page:
        assert page.run("print('{\"a\": 1}')") == {"a": 1}
        with pytest.raises(ValueError, match="in the kernel: ZeroDivisionError"):
            page.run("1 / 0")
        page.run(dashboard.CHILD)
        page.run("bench = Bench('nano', 1, 10, False)")
        page.run("bench.block(True, 0.5)")
        (board,) = page.boards.values()
        assert board.frames >= 2 and board.messages >= board.frames and board.bytes > 1000 * board.frames
        assert not board.open, "the bench closed it"
        pid = page.run("import os\nprint(os.getpid())")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_unknown_shape_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--shape", "m9"]) == 2
    assert "m9" in capsys.readouterr().err
