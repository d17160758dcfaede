"""What the process asks of the machine: disk priority and cores, for each of its threads, given back at the end.

Linux keeps both by thread, and a thread begins with what the one that starts it has. So every thread that there is gets
them before compute pool and readers are started, and each is read back: what does not hold is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..errors import ConfigError, NotAvailable

# io_priority -> (class, level) as in ioprio_set(2): 1 real time, 2 best effort with levels 0 to 7, 3 idle
PRIORITIES = {"idle": (3, 0), "low": (2, 7), "normal": (2, 4), "high": (1, 4)}
SCHEDULERS = {
    "bfq": "it serves classes and levels",
    "mq-deadline": "it serves high first and idle last, and tells low from normal no more than from none",
    "none": "it passes requests on as they come: no priority changes anything on this disk",
    "kyber": "it knows no priorities: none changes anything on this disk",
}
Read = Callable[[psutil.Process], Any]
Write = Callable[[psutil.Process, Any], Any]


class Host:
    """The standing of all threads of this process while an engine is open.

    It is the process's, not the engine's: of two engines with different settings the later one decides, and they are to
    be closed in the opposite order.
    """

    def __init__(self, io_priority: str = "none", mask: int | None = None) -> None:
        """Applies both; ConfigError or NotAvailable names the key and the reason, and nothing is changed then.

        mask: bit i stands for core i.
        """
        self.io_priority, self.mask = io_priority, mask
        self._changes: list[_Change] = []
        for key, asked in (("cpu_affinity_mask", mask is not None), ("io_priority", io_priority != "none")):
            if asked and sys.platform != "linux":
                raise NotAvailable(f"settings: {key}: this system does not offer it; leave the key out")
        try:
            if mask is not None:
                self._apply(_Change("cpu_affinity_mask", cores_of(mask), _cores, _set_cores))
            if io_priority != "none":
                self._apply(_Change("io_priority", PRIORITIES[io_priority], _priority, _set_priority))
        except BaseException:
            self.restore()
            raise

    def _apply(self, change: _Change) -> None:
        self._changes.append(change)
        change.apply()

    def restore(self) -> None:
        """Every thread gets back what it had, unless somebody else has changed it meanwhile; idempotent."""
        while self._changes:
            self._changes.pop().undo()

    def counters(self) -> dict[str, int]:
        """Threads that were there at load and got the setting; those started later inherit it."""
        counts = {change.key: len(change.before) for change in self._changes}
        return {
            "affinity_threads": counts.get("cpu_affinity_mask", 0),
            "priority_threads": counts.get("io_priority", 0),
        }

    def describe(self, file: Path) -> dict[str, Any]:
        """Facts, and what the scheduler of the disk under `file` makes of a priority."""
        scheduler = disk_scheduler(file)
        effect = SCHEDULERS.get(scheduler or "", "what it makes of priorities is not known here")
        return {
            "cpu_affinity_mask": None if self.mask is None else hex(self.mask),
            "io_priority": self.io_priority,
            "io_scheduler": scheduler,
            "io_priority_effect": f"{scheduler or 'an unknown scheduler'}: {effect}",
        }


class _Change:
    """One property given to all threads, and what each of them had."""

    def __init__(self, key: str, wanted: Any, read: Read, write: Write) -> None:
        self.key, self._wanted, self._read, self._write = key, wanted, read, write
        self.before: dict[int, Any] = {}  # by thread id
        self._got: Any = wanted  # what the system made of it
        self._usual = read(psutil.Process())  # for threads that are started later

    def apply(self) -> None:
        while new := [t.id for t in psutil.Process().threads() if t.id not in self.before]:  # some may just start
            for tid in new:
                self.before[tid] = None
                try:
                    thread = psutil.Process(tid)
                    self.before[tid] = self._read(thread)
                    self._write(thread, self._wanted)
                    self._got = self._read(thread)
                except psutil.NoSuchProcess:
                    continue  # it has just ended
                except psutil.AccessDenied:
                    raise ConfigError(_denied(self.key)) from None
                if self._got != self._wanted:
                    raise ConfigError(_refused(self.key, self._wanted, self._got))

    def undo(self) -> None:
        for tid in [t.id for t in psutil.Process().threads()]:
            try:
                thread = psutil.Process(tid)
                if self._read(thread) == self._got:
                    self._write(thread, self.before.get(tid) or self._usual)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended, or its owner has changed: nothing to give back


def in_words(about: Mapping[str, Any]) -> str:
    """What an engine's description says of it; empty where nothing was asked for."""
    said = [f"cores {about['cpu_affinity_mask']}"] if about["cpu_affinity_mask"] else []
    if about["io_priority"] != "none":
        said.append(f"disk priority {about['io_priority']} ({about['io_priority_effect']})")
    return "; ".join(said)


def cores_of(mask: int) -> list[int]:
    """Numbers of the set bits, ascending."""
    return [core for core in range(mask.bit_length()) if mask >> core & 1]


def disk_scheduler(file: Path) -> str | None:
    """The I/O scheduler of the disk that a file lies on (Linux); None where there is none to be found."""
    try:
        device = file.stat().st_dev
        place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        for folder in (place, place.parent):  # a partition's queue is its disk's
            if (folder / "queue" / "scheduler").exists():
                return (folder / "queue" / "scheduler").read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        pass  # not Linux, or not ours to see
    return None


def _cores(thread: psutil.Process) -> list[int]:
    return sorted(thread.cpu_affinity() or ())


def _set_cores(thread: psutil.Process, cores: Sequence[int]) -> None:
    try:
        thread.cpu_affinity(list(cores))
    except ValueError:  # not one of them is there
        raise ConfigError(_refused("cpu_affinity_mask", list(cores), [])) from None


def _priority(thread: psutil.Process) -> tuple[int, int]:
    kind, level = thread.ionice()
    return int(kind), int(level)


def _set_priority(thread: psutil.Process, priority: tuple[int, int]) -> None:
    thread.ionice(*priority)


def _denied(key: str) -> str:
    if key == "io_priority":
        return "settings: io_priority: the system refuses it: high needs the capability CAP_SYS_NICE; choose normal"
    return f"settings: {key}: the system refuses it to this user; leave the key out"


def _refused(key: str, wanted: Any, got: Any) -> str:
    if key == "cpu_affinity_mask":
        missing = ", ".join(str(core) for core in wanted if core not in got)
        return (
            f"settings: cpu_affinity_mask: this process cannot have core {missing}; "
            f"name some of the {os.cpu_count()} cores, counted from 0, that it may run on"
        )
    return f"settings: {key}: the system took {got} for {wanted}; leave the key out"
