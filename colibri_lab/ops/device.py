"""One card as launches see it: a stream for kernels, one for transfers, all memory, and the order of the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

import numpy as np

from .driver import Driver, Host

COUNTERS = ("device_bytes", "locked_bytes", "sent_bytes", "read_bytes", "sends", "send_waits")


class Device:
    """Memory and launches on a driver. What is asked for here is given back by `close`, whatever happened meanwhile.

    `write`, `read` and `run` go through the stream of kernels, in order. `send` goes through the stream of transfers,
    beside the kernels: `sent` and `used` are events that order the two.
    """

    def __init__(self, driver: Driver, reset: bool = False) -> None:
        """reset: see Driver.close."""
        self.driver, self.name, self.reset = driver, driver.name, reset
        self._arrays: list[Any] = []
        self._locked: list[Host] = []
        self._graphs: dict[int, Any] = {}  # nobody else holds them, so that they go before what they name
        self._numbers = count()
        self._streams: tuple[Any, Any] | None = None  # kernels, transfers
        self.device_bytes = self.locked_bytes = self.sent_bytes = self.read_bytes = self.sends = self.send_waits = 0

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """An array with no contents to rely on. DeviceFull."""
        array = self.driver.empty(shape, dtype)
        self._arrays.append(array)
        self.device_bytes += int(array.nbytes)
        return array

    def write(self, target: Any, host: Host) -> None:
        """Copy a host array into one of the same shape and dtype, in order with the kernels."""
        self.driver.write(target, _fitting(target, host), self._kernels)
        self.sent_bytes += host.nbytes

    def read(self, array: Any) -> Host:
        """A copy on the host, after all launches so far."""
        host = np.empty(array.shape, array.dtype)
        self.driver.read(host, array, self._kernels)
        self.driver.synchronise(self._kernels)
        self.read_bytes += host.nbytes
        return host

    def run(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
            shared: int) -> None:  # fmt: skip
        """Launch one kernel of a file; the arguments are checked already."""
        self.driver.launch(file, name, grid, threads, arguments, shared, self._kernels)

    def captured(self, work: Callable[[], None]) -> int:
        """The number of a graph of the launches that `work` makes; none of them is done. See Driver.capture for what it
        may do."""
        stream = self._kernels
        self.driver.capture(stream)
        try:
            work()
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is told
                self.driver.captured(stream)
            raise
        number = next(self._numbers)
        self._graphs[number] = self.driver.captured(stream)
        return number

    def replay(self, number: int) -> None:
        """What was captured, in order with the kernels."""
        self.driver.replay(self._graphs[number], self._kernels)

    def drop(self, number: int) -> None:
        """Let go of a graph, when all work on it has ended."""
        self.driver.synchronise(self._kernels)
        del self._graphs[number]

    def lock(self, host: Host) -> None:
        """Keep host memory in place until `unlock` or the end, so that `send` reads it directly. CannotLock."""
        self.driver.lock(host)
        self._locked.append(host)
        self.locked_bytes += host.nbytes

    def unlock(self, host: Host) -> None:
        """After all transfers so far. What was locked is known by where it begins; nothing happens where it was not."""
        at = next((i for i, one in enumerate(self._locked) if one.ctypes.data == host.ctypes.data), None)
        if at is None:
            return
        self.driver.synchronise(self._transfers)
        locked = self._locked.pop(at)
        self.locked_bytes -= locked.nbytes
        self.driver.unlock(locked)

    def send(self, target: Any, host: Host) -> None:
        """Like `write`, beside the kernels; locked memory must stay as it is until a later `sent` has happened."""
        self.driver.write(target, _fitting(target, host), self._transfers)
        self.sent_bytes += host.nbytes
        self.sends += 1

    def sent(self) -> Any:
        """An event: all transfers so far have ended."""
        return self.driver.record(self._transfers)

    def used(self) -> Any:
        """An event: all kernels so far have ended."""
        return self.driver.record(self._kernels)

    def after_sent(self, event: Any) -> None:
        """Kernels from now on begin after a `sent`; counted where that means to wait."""
        self.send_waits += not self.driver.happened(event)
        self.driver.wait(self._kernels, event)

    def after_used(self, event: Any) -> None:
        """Transfers from now on begin after a `used`."""
        self.driver.wait(self._transfers, event)

    def settle(self) -> None:
        """Return when all transfers so far have ended."""
        self.driver.synchronise(self._transfers)

    def counters(self) -> dict[str, int]:
        """Bytes; transfers beside the kernels; and how often kernels had to wait for one."""
        return {name: getattr(self, name) for name in COUNTERS}

    def release(self) -> None:
        """Give all memory and streams back; idempotent. Work ends first, then graphs go and host memory is let go,
        then device memory, newest first, then the streams. An error on the way does not keep what comes after it."""
        arrays, locked, streams, graphs = self._arrays, self._locked, self._streams or (), self._graphs
        self._arrays, self._locked, self._streams, self._graphs = [], [], None, {}
        self.device_bytes = self.locked_bytes = 0
        with ExitStack() as last_first:
            for array in arrays:
                last_first.callback(self.driver.free, array)
            for host in locked:
                last_first.callback(self.driver.unlock, host)
            last_first.callback(graphs.clear)
            for stream in streams:
                last_first.callback(self.driver.synchronise, stream)

    def close(self) -> None:
        """The same, and the driver lets go of its kernels, and with `reset` of the process's context."""
        try:
            self.release()
        finally:
            self.driver.close(self.reset)

    @property
    def _kernels(self) -> Any:
        return self._open()[0]

    @property
    def _transfers(self) -> Any:
        return self._open()[1]

    def _open(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = self.driver.stream(), self.driver.stream()
        return self._streams


def _fitting(target: Any, host: Host) -> Host:
    if target.shape != host.shape or target.dtype != host.dtype:
        raise ValueError(f"{host.dtype} {host.shape} does not go into {target.dtype} {target.shape}")
    return host
