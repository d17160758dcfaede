"""How full memory is and how idle the processor: what the batch size follows, behind one small protocol."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from ..memory import memory_share


@dataclass(frozen=True)
class Reading:
    """Shares, 0 to 1. memory: in use; idle: of the cores' time since the last reading; device: of GPU memory in use,
    None where none is read. ValueError for anything else."""

    memory: float
    idle: float
    device: float | None = None

    def __post_init__(self) -> None:
        for share in (self.memory, self.idle, self.device or 0.0):
            if not 0 <= share <= 1:  # not a number, too
                raise ValueError(f"a reading's shares lie between 0 and 1: {self}")


class Probe(Protocol):
    """Anything with `read()`: the machine, or readings that were recorded, which may end with StopIteration: the batch
    size stays as it is then."""

    def read(self) -> Reading: ...


class HostProbe:
    """psutil for memory and cores, NVML (package nvidia-ml-py) for a GPU where both are there.

    Memory: of the machine or of this process's container, whichever is fuller; page cache that can be dropped is not in
    use. Cores: those that this process may run on; waiting for a disk is idling.
    """

    def __init__(self) -> None:
        self._busy, self._total = _times()
        self._nvml, self._devices, self._why = _open_nvml()

    def read(self) -> Reading:
        """The machine now; about a tenth of a millisecond."""
        before = self._busy, self._total
        self._busy, self._total = _times()
        passed = self._total - before[1]
        idle = 1 - (self._busy - before[0]) / passed if passed > 0 else 0.0
        return Reading(memory_share(), min(1.0, max(0.0, idle)), self._device_share())

    def describe(self) -> str:
        gpus = f"{len(self._devices)} GPU" if self._devices else f"no GPU ({self._why})"
        listed = ", ".join(map(str, cores()))
        return f"memory of {psutil.virtual_memory().total / 2**30:.1f} GiB or the container's, cores {listed}, {gpus}"

    def close(self) -> None:
        """Let go of NVML; idempotent."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._devices = None, []

    def _device_share(self) -> float | None:
        infos = [self._nvml.nvmlDeviceGetMemoryInfo(device) for device in self._devices]
        return max((min(1.0, info.used / max(1, info.total)) for info in infos), default=None)


def _times() -> tuple[float, float]:
    """(busy, all) seconds of this process's cores since the machine started."""
    busy = total = 0.0
    times, mine = psutil.cpu_times(percpu=True), cores()
    for core in (times[i] for i in mine if i < len(times)):
        guests = getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0)  # in `user` and `nice` already
        idle = core.idle + getattr(core, "iowait", 0.0)
        total += sum(core) - guests
        busy += sum(core) - guests - idle
    return busy, total


def cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _open_nvml() -> tuple[Any, list[Any], str]:
    """(NVML, its devices, why there are none)."""
    try:
        import pynvml
    except ImportError:
        return None, [], "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, [], f"NVML: {error}"
    return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())], "NVML lists none"
