"""What the engine needs of a GPU, and nothing more: memory, streams, events, copies, launches.

A driver is a card's (`driver_cupy.CupyDriver`) or the simulator's (`simulator.SimDriver`, for tests). All that is above
it is the same code: `device.Device` and the launches in `cuda*.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError

Host = np.ndarray[Any, Any]


class DeviceFull(ConfigError):
    """The card has no memory left for what the settings ask for."""

    def __init__(self, size: int, free: int | None = None) -> None:
        """size: bytes that were asked for; free: bytes that there are, where that is known."""
        left = "" if free is None else f", {free / 2**20:.4g} MiB are free"
        super().__init__(
            f"settings: the GPU has no room for {size / 2**20:.4g} MiB more{left}; lower gpu_cache_bytes, "
            f"kv_cache_max_slots or max_batch_size"
        )


class CannotLock(ConfigError):
    """Host memory that transfers go from could not be locked into place."""

    def __init__(self, size: int, why: str) -> None:
        super().__init__(
            f"settings: expert_cache_bytes: {size / 2**20:.4g} MiB of memory cannot be locked for the GPU ({why}); "
            f"lower it, or raise the limit of locked memory (ulimit -l)"
        )


@dataclass(frozen=True)
class Facts:
    """Of a card: sizes in bytes, versions as CUDA counts them (13000 is 13.0)."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]
    driver: int
    runtime: int


class Driver(Protocol):
    """One card. Arrays are of its own kind: they slice, and have shape, dtype, size and flags.c_contiguous.

    A stream does its work in order; what two streams do is ordered by events alone. Copies return at once: memory of
    the host that is not locked has been read by then, what is locked must stay as it is until the copy has ended.
    """

    name: str

    def facts(self) -> Facts: ...

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """An array of device memory, with no contents to rely on. DeviceFull."""

    def free(self, array: Any) -> None:
        """Give back what `empty` gave; nothing may use it any more."""

    def lock(self, host: Host) -> None:
        """Keep host memory where it is, so that copies from it need no detour. CannotLock."""

    def unlock(self, host: Host) -> None: ...

    def stream(self) -> Any: ...

    def record(self, stream: Any) -> Any:
        """An event that has happened when all that the stream was given so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on begins after the event."""

    def happened(self, event: Any) -> bool: ...

    def synchronise(self, stream: Any) -> None:
        """Return when the stream has nothing left to do."""

    def write(self, target: Any, host: Host, stream: Any) -> None: ...

    def read(self, host: Host, source: Any, stream: Any) -> None:
        """The host's memory is written when the stream is synchronised."""

    def launch(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
               shared: int, stream: Any) -> None:  # fmt: skip
        """One kernel of kernels/cuda/`file`.cu; arguments are checked already."""

    def capture(self, stream: Any) -> None:
        """From now on what the stream is given is not done but noted, until `captured`. Only launches may come, of
        kernels that have been launched before: nothing is taken, freed, copied or waited for."""

    def captured(self, stream: Any) -> Any:
        """A graph of the launches since `capture`, with the arguments that they had: arrays by their place."""

    def replay(self, graph: Any, stream: Any) -> None:
        """All launches of a graph, in order."""

    def address(self, array: Any) -> int:
        """Where an array begins."""

    def close(self, reset: bool) -> None:
        """Let go of compiled kernels. reset: of the process's pools and context on the card too; never of the card."""
