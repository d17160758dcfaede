"""Disk priority and cores: every thread of the process has them while the engine is open, and what was before after."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from colibri_lab.config import Config
from colibri_lab.engine.host import PRIORITIES, Host, cores_of, disk_scheduler
from colibri_lab.errors import ConfigError, NotAvailable
from colibri_lab.pager.queue import QueueTransfer

from .conftest import Load

CORE = min(os.sched_getaffinity(0))


def allowed(tid: int) -> set[int]:
    """Cores of a thread, as the kernel's own text says (`Cpus_allowed_list: 0-2,5`)."""
    lines = Path(f"/proc/self/task/{tid}/status").read_text().splitlines()
    listed = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    ends = [list(map(int, part.split("-"))) for part in listed.split(",")]
    return {core for end in ends for core in range(end[0], end[-1] + 1)}


def standing() -> dict[int, tuple[set[int], tuple[int, int]]]:
    """(cores, I/O class and level) of each thread."""
    tids = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return {tid: (allowed(tid), tuple(map(int, psutil.Process(tid).ionice()))) for tid in tids}


@contextmanager
def bystander() -> Iterator[int]:
    """A thread of somebody else, there before the engine."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        yield thread.native_id or 0
    finally:
        end.set()
        thread.join()


def test_every_thread_has_them_and_gets_its_own_back(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueTransfer, "open", lambda *arguments: None)  # readers that are threads
    with bystander() as other:
        before = standing()
        engine = load(
            threads=2, io_threads=3, prefetcher="next_gate", expert_cache_bytes="1MiB", io_priority="idle",
            cpu_affinity_mask=hex(1 << CORE),
        )  # fmt: skip
        list(engine.generate("The sea", max_tokens=5))
        during = standing()
        names = {thread.name for thread in threading.enumerate()}
        assert {"colibri-reader", "colibri-ahead"} <= names, "readers that were started later"
        assert len(during) >= len(before) + 1 + 2, "the compute pool's thread, and two readers at least"
        assert set(map(str, during.values())) == {str(({CORE}, PRIORITIES["idle"]))}
        assert engine.counters()["host"] == {"affinity_threads": len(before), "priority_threads": len(before)}
        about = engine.describe()
        assert about["cpu_affinity_mask"] == hex(1 << CORE) and about["io_priority"] == "idle"
        assert f"cores {hex(1 << CORE)}; disk priority idle (" in engine._repr_html_()
        engine.close()
        after = standing()
        assert other in after and all(after[tid] == before[tid] for tid in before.keys() & after.keys())


def test_threads_default_to_the_cores_of_the_mask(load: Load) -> None:
    plain = load(threads=None)
    assert plain.counters()["host"] == {"affinity_threads": 0, "priority_threads": 0}
    ids = [t.id for t in plain.generate("The sea", max_tokens=10)]
    plain.close()
    engine = load(threads=None, cpu_affinity_mask=1 << CORE)
    assert engine.describe()["threads"] == 1
    assert [t.id for t in engine.generate("The sea", max_tokens=10)] == ids


@pytest.mark.parametrize("name", ["low", "normal"])
def test_classes_and_levels(name: str) -> None:
    host = Host(name)
    try:
        assert {value for _, value in standing().values()} == {PRIORITIES[name]}
    finally:
        host.restore()
    assert PRIORITIES[name] not in {value for _, value in standing().values()}


def test_high_is_real_time_or_refused_with_the_capability() -> None:
    """As the user that nothing is allowed to, in a child."""
    script = """
import os
from colibri_lab.engine.host import Host
from colibri_lab.errors import ConfigError
import psutil
if os.geteuid() == 0:
    Host("high").restore()
    os.setuid(65534)
try:
    Host("high", 1 << min(os.sched_getaffinity(0)))
except ConfigError as error:
    print(error)
print(sorted(os.sched_getaffinity(0)), psutil.Process().ionice().ioclass)
"""
    before = sorted(os.sched_getaffinity(0))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    said, after = run.stdout.splitlines()
    assert said.startswith("settings: io_priority: ") and "CAP_SYS_NICE" in said
    assert after.startswith(str(before)), "the cores, which were taken before the refusal, are as they were"


def test_cores_that_are_not_there() -> None:
    before = standing()
    for mask in (1 << CORE | 1 << 1000, 1 << 1000):
        with pytest.raises(ConfigError, match=r"cpu_affinity_mask: this process cannot have core 1000; name some of"):
            Host(mask=mask)
    assert all(value == before[tid] for tid, value in standing().items() if tid in before)


def test_a_failed_load_leaves_the_process_alone(load: Load) -> None:
    with pytest.raises(ConfigError, match="the least is"):
        load(cpu_affinity_mask=1 << CORE, io_priority="idle", expert_cache_bytes=1)
    assert (3, 0) not in {value for _, value in standing().values()}


def test_what_somebody_else_changed_stays() -> None:
    with bystander() as other:
        host = Host("idle")
        psutil.Process(other).ionice(2, 6)
        host.restore()
        host.restore()
        assert tuple(map(int, psutil.Process(other).ionice())) == (2, 6)


def test_other_systems_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    Host()
    for settings, key in (({"io_priority": "low"}, "io_priority"), ({"mask": 1}, "cpu_affinity_mask")):
        with pytest.raises(NotAvailable, match=f"settings: {key}: this system does not offer it"):
            Host(**settings)  # type: ignore[arg-type]


def test_masks() -> None:
    assert cores_of(0b101101) == [0, 2, 3, 5]
    for given in (5, "0x5", "0X05"):
        assert Config.make({"cpu_affinity_mask": given}).cpu_affinity_mask == 5


def test_the_scheduler_of_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert disk_scheduler(tmp_path / "missing") is None and disk_scheduler(Path("/proc/self/status")) is None
    resolve: Callable[..., Any] = Path.resolve
    (tmp_path / "sda" / "sda1").mkdir(parents=True)
    (tmp_path / "sda" / "queue").mkdir()
    (tmp_path / "sda" / "queue" / "scheduler").write_text("none [mq-deadline] kyber bfq\n")
    monkeypatch.setattr(
        Path, "resolve", lambda self, *a: tmp_path / "sda" / "sda1" if "block" in str(self) else resolve(self)
    )
    assert disk_scheduler(tmp_path) == "mq-deadline"
    about = Host().describe(tmp_path)
    assert about["io_scheduler"] == "mq-deadline" and "idle last" in about["io_priority_effect"]
    (tmp_path / "sda" / "queue" / "scheduler").write_text("[none]\n")
    assert "no priority changes anything" in Host().describe(tmp_path)["io_priority_effect"]
