"""The stopwatch and the form of results."""

from __future__ import annotations

import json
import statistics
import threading
import time

import pytest
from rich.console import Console

from colibri_lab.bench.harness import Block, interleave, measured, percentile, run_queue_delay, spread
from colibri_lab.bench.result import NOISY, Result


def test_sides_take_turns() -> None:
    seen: list[str] = []

    def side(name: str) -> Block:
        seen.append(name)
        return Block(1)

    blocks = interleave(3, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert "".join(seen) == "ababab"
    assert {name: len(found) for name, found in blocks.items()} == {"a": 3, "b": 3}


def test_cpu_time_counts_work_and_not_waiting() -> None:
    with measured(1) as idle:
        time.sleep(0.05)
    with measured(1) as busy:
        sum(range(400_000))
    assert idle.wall_s >= 0.05
    assert idle.cpu_s < 0.04
    assert busy.cpu_s > 0
    assert busy.cpu_rate == pytest.approx(1 / busy.cpu_s)


def test_cpu_time_counts_all_threads() -> None:
    def work() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    with measured(1) as block:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert block.cpu_s >= 0.1


def test_delay_never_shrinks() -> None:
    before = run_queue_delay()
    assert run_queue_delay() >= before >= 0


def test_statistics() -> None:
    assert spread([1.0]) == 0
    assert spread([1, 1, 1, 1, 100]) == 0  # one outlier is no spread
    assert spread([80, 90, 100, 110, 120]) == pytest.approx(0.2)
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert percentile(values, 0.5) == statistics.median(values)
    assert percentile(values, 0) == 1
    assert percentile(values, 1) == 5
    assert percentile(values, 0.9) == pytest.approx(4.6)


def test_ratio_and_share_mean_what_they_say() -> None:
    result = Result("x")
    result.add("speed", 20.0, "tokens/s", peer="p", peer_value=10.0, limit=40.0)
    result.add("time", 5.0, "ms", peer="p", peer_value=10.0, limit=4.0, smaller_is_better=True)
    speed, took = result.rows
    assert (speed.ratio, speed.share) == (2.0, 0.5)
    assert (took.ratio, took.share) == (2.0, 0.8)


def test_json_form() -> None:
    result = Result("decode m1")
    result.add("speed", 1 / 3, "tokens/s")
    line = result.to_json()
    assert "\n" not in line
    form = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert {"bench", "machine", "noisy", "rows"} <= set(form)
    assert form["noisy"] is False
    keys = {"what", "value", "unit", "peer", "peer_value", "ratio", "limit", "share"}
    assert [set(row) for row in form["rows"]] == [keys]
    assert form["rows"][0]["value"] == pytest.approx(1 / 3, rel=1e-5)
    assert {"cpu", "cores", "memory_gib", "python"} <= set(form["machine"])


def test_a_number_that_is_none_is_refused() -> None:
    result = Result("x")
    result.add("broken", float("nan"), "tokens/s")
    with pytest.raises(ValueError, match="JSON"):
        result.to_json()


def test_noise_shows_in_form_table_and_exit_code() -> None:
    quiet, noisy = Result("x"), Result("x", reasons=["the machine was busy"])
    assert (quiet.exit_code, noisy.exit_code) == (0, NOISY)
    assert json.loads(noisy.to_json())["noisy"] is True
    console = Console(record=True, width=100, file=open("/dev/null", "w"))
    noisy.show(console)
    console.file.close()
    assert "the machine was busy" in console.export_text()
