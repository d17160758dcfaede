"""The batch size follows recorded readings and, once, memory that is really full; no token depends on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.engine import adapt
from colibri_lab.engine.adapt import CALM, FULL, IDLE, QUIET, BatchSize
from colibri_lab.engine.batcher import Batcher
from colibri_lab.engine.probe import HostProbe, Reading
from colibri_lab.memory import memory_share

from .conftest import Load

MIB = 1 << 20
TIGHT, ROOMY, BUSY = Reading(0.9, 0.9), Reading(0.5, 0.9), Reading(0.5, 0.1)


class Recorded:
    """Readings one after another, the last for ever."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = list(readings)

    def read(self) -> Reading:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]


def crowd(running: int = 9, waiting: int = 3) -> Batcher:
    batcher = Batcher()
    batcher.running = [SimpleNamespace(ready=()) for _ in range(running)]  # type: ignore[misc]
    batcher.waiting.extend(SimpleNamespace() for _ in range(waiting))  # type: ignore[misc]
    return batcher


def caps(readings: Sequence[Reading], most: int = 8, batcher: Batcher | None = None, **more: Any) -> list[int]:
    """The cap after each reading, with a clock that ticks once an interval."""
    batch = BatchSize(most, 500, lambda change: None, **more)
    batch.follow(Recorded(*readings))
    batcher = batcher or crowd()
    found = []
    for tick in range(len(readings)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapt, "clock", lambda tick=tick: (tick + 1) * 500_000_000)
            found += [batch.now(batcher)]
            assert batch.now(batcher) == found[-1] and batch.readings == tick + 1, "one look an interval"
    assert batch.counters()["adaptations"] == batch.counters()["halvings"] + batch.counters()["growths"]
    return found


def test_halves_above_85_per_cent_and_never_under_one() -> None:
    assert caps([Reading(FULL, 1.0), TIGHT, TIGHT, TIGHT, TIGHT]) == [8, 4, 2, 1, 1]
    assert caps([TIGHT], most=1) == [1]


def test_grows_by_one_after_quiet_readings_while_idle_and_wanted() -> None:
    assert caps([TIGHT] + [ROOMY] * 9) == [4, 4, 4, 4, 5, 6, 7, 8, 8, 8], "never past max_batch_size"
    assert set(caps([TIGHT] + [BUSY] * 9)) == {4}, "the processor has something to do"
    assert set(caps([TIGHT] + [Reading(0.5, IDLE)] * 9)) == {4}
    assert set(caps([TIGHT] + [ROOMY] * 9, batcher=crowd(4, 0))) == {4}, "nobody waits"
    assert caps([TIGHT] + [ROOMY] * 5, batcher=crowd(6, 0))[-2:] == [5, 6], "a running one is held back"


def test_does_not_swing() -> None:
    between = (FULL + CALM) / 2
    assert set(caps([TIGHT] + [Reading(between, 0.9), ROOMY, ROOMY, ROOMY] * 6)) == {4}, "not quiet for long enough"
    assert caps([TIGHT, *[ROOMY] * QUIET, TIGHT, *[ROOMY] * QUIET]) == [4, 4, 4, 4, 5, 2, 2, 2, 2, 3]
    changes = caps([Reading(0.86 if i % 3 == 0 else 0.84, 0.9) for i in range(30)], most=256)
    assert all(later <= earlier for earlier, later in pairwise(changes))


def test_a_gpu_counts_where_the_model_is_on_it() -> None:
    readings = [Reading(0.2, 0.9, device=0.95)] * 3
    assert caps(readings) == [8, 8, 8] and caps(readings, on_device=True) == [4, 2, 1]


def test_what_is_read_after_a_rest_decides_nothing() -> None:
    assert caps([TIGHT] * 4, batcher=crowd(0, 5)) == [8] * 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(Reading, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60), st.integers(1, 64))
def test_any_readings(readings: list[Reading], most: int) -> None:
    found = [most, *caps(readings, most)]
    for before, after, reading in zip(found, found[1:], readings, strict=False):
        assert 1 <= after <= most
        assert after in (before, before // 2, before + 1)
        assert after >= before or reading.memory > FULL
        assert after <= before or (reading.memory <= CALM and reading.idle > IDLE)


def test_the_engine_pauses_the_youngest_and_says_why(load: Load) -> None:
    prompts = [[3 + i] * (i + 1) for i in range(8)]
    plain = load(max_batch_size=8)
    right = [[t.id for t in plain.generate(p, max_tokens=40)] for p in prompts]
    engine = load(max_batch_size=8, batch_adapt_interval_ms=1)
    assert "cores" in engine.describe()["batch_follows"] and plain.describe()["batch_follows"] is None
    engine.watch(Recorded(ROOMY, *[TIGHT] * 4, ROOMY))
    assert engine.describe()["batch_follows"] == "Recorded"
    cursor = engine.telemetry.cursor()
    said: list[list[int]] = [[] for _ in prompts]
    for i, token in engine.generate_batch(prompts, max_tokens=40):
        said[i].append(token.id)
    assert said == right
    batch = engine.counters()["batch"]
    assert batch["halvings"] == 3 and 1 <= batch["growths"] <= 7 and batch["held"] > 0
    assert batch["adaptations"] == batch["halvings"] + batch["growths"] and batch["readings"] >= batch["adaptations"]
    assert (batch["memory_permille"], batch["idle_permille"], batch["device_permille"]) == (500, 900, 0)
    notes = [value for key, value, _ in engine.telemetry.read(cursor).notes if key == "batch"]
    assert [(n["before"], n["after"]) for n in notes][:4] == [(8, 4), (4, 2), (2, 1), (1, 2)]
    assert notes[0]["reason"] == "memory is 90% in use, above 85%" and notes[0]["running"] == 8
    assert notes[3]["reason"] == "the processor idles 90%, above 30%"
    assert engine.counters()["kv"]["slots_used"] == 0
    assert "3 halvings" in engine._repr_html_() and "follows Recorded" in engine._repr_html_()
    assert "halvings" not in plain._repr_html_()
    idle = plain.counters()["batch"]
    assert idle == dict(idle, cap=8, readings=0, adaptations=0, held=0)


def test_a_step_has_no_more_requests_than_the_cap(load: Load) -> None:
    engine = load(max_batch_size=8, batch_adapt_interval_ms=10_000)
    steps, plan = [], engine._stepper.batcher.plan

    def watched(chunk: int, most: int, everybody: bool = False) -> Any:
        works, held = plan(chunk, most, everybody)
        steps.append((len(works), most, held))
        return works, held

    engine._stepper.batcher.plan = watched  # type: ignore[method-assign]
    tokens = engine.generate_batch([[5, 6]] * 8, max_tokens=6)
    next(tokens)
    engine.watch(Recorded(TIGHT))
    engine._stepper.batch._due = 0
    next(tokens)
    assert steps[0] == (8, 8, 0)
    list(tokens)
    assert all(works <= most for works, most, _ in steps) and {most for _, most, _ in steps[1:]} == {4}
    assert engine.counters()["batch"]["held"] == sum(held for *_, held in steps) > 0
    engine.settings.max_batch_size = 8  # begins anew
    assert engine.counters()["batch"]["cap"] == 8
    engine.settings.batch_adapt_interval_ms = None
    list(engine.generate_batch([[5, 6]] * 8, max_tokens=6))
    assert engine.counters()["batch"]["halvings"] == 1 and engine.describe()["batch_follows"] is None


def test_recorded_readings_may_end_and_wrong_ones_are_named(load: Load) -> None:
    engine = load(max_batch_size=4, batch_adapt_interval_ms=1)
    engine.watch(SimpleNamespace(read=iter([ROOMY, TIGHT]).__next__))
    assert len(list(engine.generate_batch([[5, 6]] * 4, max_tokens=30))) == 120
    assert engine.counters()["batch"]["readings"] == 2 and engine.counters()["batch"]["cap"] == 2
    for wrong in ((float("nan"), 0.5), (1.2, 0.5), (0.5, -0.1), (0.5, 0.5, 7.0)):
        with pytest.raises(ValueError, match="a reading's shares lie between 0 and 1"):
            Reading(*wrong)


def test_a_request_that_is_held_back_can_be_dropped(load: Load) -> None:
    engine = load(max_batch_size=4, batch_adapt_interval_ms=1)
    right = [t.id for t in load().generate([7, 8], max_tokens=30)]
    oldest, youngest = (engine.generate([7, 8], max_tokens=30) for _ in range(2))
    said = [next(oldest).id]
    next(youngest)
    engine.watch(Recorded(TIGHT))
    said += [next(oldest).id for _ in range(20)]
    assert engine.counters()["batch"]["cap"] == 1
    used = engine.counters()["kv"]["slots_used"]
    youngest.close()
    assert engine.counters()["kv"]["slots_used"] < used
    assert said + [t.id for t in oldest] == right and engine.counters()["kv"]["slots_used"] == 0


def test_requests_of_many_threads_end_under_a_small_cap(load: Load) -> None:
    engine = load(max_batch_size=6, batch_adapt_interval_ms=1)
    engine.watch(Recorded(TIGHT))
    right = [t.id for t in load().generate([7, 8], max_tokens=15)]
    said: list[list[int]] = [[] for _ in range(9)]

    def consume(i: int) -> None:
        said[i] += [t.id for t in engine.generate([7, 8], max_tokens=15)]

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(len(said))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == [right] * len(said) and engine.counters()["batch"]["cap"] == 1


def test_nvml_is_read_where_it_is_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    nvml = SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(used=(30, 75)[i], total=100),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    probe = HostProbe()
    assert probe.read().device == 0.75 and probe.describe().endswith("2 GPU")
    probe.close()
    probe.close()
    assert calls == ["init", "shutdown"] and probe.read().device is None

    def no_driver() -> None:
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = no_driver
    assert HostProbe().read().device is None and "no GPU (NVML: Driver Not Loaded)" in HostProbe().describe()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert HostProbe().describe().endswith("no GPU (the package nvidia-ml-py is not installed)")


def test_idle_is_of_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    Times = type("Times", (tuple,), {"idle": property(lambda t: t[1]), "iowait": property(lambda t: t[2])})
    moments = [[Times((10, 10, 0)), Times((0, 0, 0))], [Times((13, 12, 5)), Times((99, 0, 0))]]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: moments[0])
    monkeypatch.setattr("colibri_lab.engine.probe.cores", lambda: [0])
    probe = HostProbe()
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: moments[1])
    assert probe.read().idle == pytest.approx(0.7), "3 of 10 seconds were work, 5 were waiting for a disk"
    assert 0 <= probe.read().idle <= 1


def test_the_share_of_memory_in_use(tmp_path: Path) -> None:
    machine = psutil.virtual_memory()
    assert abs(memory_share(tmp_path, tmp_path / "none") - (1 - machine.available / machine.total)) < 0.05
    for name, text in {"max": 100 * MIB, "current": 99 * MIB, "stat": f"inactive_file {MIB}"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    (tmp_path / "self").write_text("0::/\n")
    assert memory_share(tmp_path, tmp_path / "self") == pytest.approx(0.98)


def control_group(limit: int) -> Path | None:
    """A new control group with a memory limit; None where none can be made."""
    for top, name in ((Path("/sys/fs/cgroup"), "memory.max"), (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")):
        group = top / f"colibri-lab-{threading.get_native_id()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / name).exists() and os.access(group / name, os.W_OK):
            (group / name).write_text(str(limit))
            return group
        group.rmdir()  # no memory controller here
    return None


@pytest.mark.parametrize("grouped", [True, False])
def test_real_memory_pressure_halves_and_its_end_lets_grow(model: Path, grouped: bool) -> None:
    """A process fills a control group's memory, or (also where no group can be made) a limit of its own."""
    group = control_group(500 * MIB) if grouped else None
    try:
        command = [sys.executable, "-m", "tests.engine.pressed", str(model), str(500 * MIB), str(group or "")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        if group is not None:
            group.rmdir()
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["before"] == 8 and found["pressed"] == 1 and found["relieved"] > 1
    assert found["halvings"] == 3 and "memory is" in found["why"] and "above 85%" in found["why"]
    assert found["same"]
