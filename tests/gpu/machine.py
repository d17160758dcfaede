"""What the sections run on: a card, or in tests the simulator; and launches that are kept, to be timed by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from colibri_lab.ops import simulator
from colibri_lab.ops.device import Device
from colibri_lab.ops.driver_cupy import CupyDriver
from colibri_lab.ops.launch import signatures
from tests.ops.models import Shape

SMALL = 1 << 20  # bytes of a buffer that the host fills anew between launches


class Launch(NamedTuple):
    """One launch as a driver takes it; part: what of a step it belongs to."""

    part: str
    file: str
    name: str
    grid: tuple[int, int, int]
    threads: int
    arguments: list[Any]
    shared: int

    def named(self) -> dict[str, Any]:
        """Arguments by the parameters' names."""
        names = [name for name, _, _ in signatures(self.file)[self.name].parameters]
        return dict(zip(names, self.arguments, strict=True))


class Tape:
    """A driver that passes everything on and keeps the launches, so that they can be run again as they were.

    What the host writes between two launches (lists of jobs, tables of frames) is kept as a copy of that moment.
    """

    def __init__(self, driver: Any) -> None:
        self._driver, self.launches, self.part = driver, list[Launch](), ""
        self._written: set[int] = set()
        self._copies: list[Any] = []
        self.keeps = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def write(self, target: Any, host: Any, stream: Any) -> None:
        if self.keeps:
            self._written.add(address(target))
        self._driver.write(target, host, stream)

    def launch(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
               shared: int, stream: Any) -> None:  # fmt: skip
        if self.keeps:
            kept = [self._copy(a, stream) if hasattr(a, "nbytes") and a.ndim else a for a in arguments]
            self.launches.append(Launch(self.part, file, name, grid, threads, kept, shared))
        self._driver.launch(file, name, grid, threads, arguments, shared, stream)

    def _copy(self, array: Any, stream: Any) -> Any:
        if address(array) not in self._written or not 0 < array.nbytes <= SMALL:
            return array
        host, copy = np.empty(array.shape, array.dtype), self._driver.empty(array.shape, array.dtype)
        self._driver.read(host, array, stream)
        self._driver.synchronise(stream)
        self._driver.write(copy, host, stream)
        self._driver.synchronise(stream)
        self._copies.append(copy)
        return copy

    def forget(self) -> None:
        """Give the copies back."""
        self.launches.clear()
        while self._copies:
            self._driver.free(self._copies.pop())


def address(array: Any) -> int:
    """Where an array of a device begins."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


class Clock(Protocol):
    """How long a driver's work takes, in seconds a round."""

    what: str

    def launches(self, driver: Any, launches: list[Launch], rounds: int) -> float: ...

    def stream(self, driver: Any, work: Callable[[Any], None], rounds: int) -> float: ...

    def copy(self, driver: Any, target: Any, source: Any, stream: Any) -> None: ...


class WallClock:
    """By the clock on the wall, launch by launch."""

    what = "launch by launch"

    def launches(self, driver: Any, launches: list[Launch], rounds: int) -> float:
        return self.stream(driver, lambda stream: launch_all(driver, launches, stream), rounds)

    def stream(self, driver: Any, work: Callable[[Any], None], rounds: int) -> float:
        stream = driver.stream()
        work(stream)
        driver.synchronise(stream)
        begin = perf_counter()
        for _ in range(rounds):
            work(stream)
        driver.synchronise(stream)
        return (perf_counter() - begin) / rounds

    def copy(self, driver: Any, target: Any, source: Any, stream: Any) -> None:
        driver.write(target, source, stream)


class CardClock:
    """By events of the card. Launches are captured into one graph first, so the host's share does not count."""

    what = "one graph"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def launches(self, driver: Any, launches: list[Launch], rounds: int) -> float:
        stream = driver.stream()
        launch_all(driver, launches, stream)  # compiles what is not compiled yet, which no graph may
        driver.synchronise(stream)
        with stream:
            stream.begin_capture()
            launch_all(driver, launches, stream)
            graph = stream.end_capture()
        return self._timed(stream, lambda: graph.launch(stream), rounds)

    def stream(self, driver: Any, work: Callable[[Any], None], rounds: int) -> float:
        stream = driver.stream()
        return self._timed(stream, lambda: work(stream), rounds)

    def copy(self, driver: Any, target: Any, source: Any, stream: Any) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(address(target), address(source), target.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def _timed(self, stream: Any, work: Callable[[], None], rounds: int) -> float:
        work()
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(stream)
        for _ in range(rounds):
            work()
        end.record(stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / rounds


def launch_all(driver: Any, launches: list[Launch], stream: Any) -> None:
    for one in launches:
        driver.launch(one.file, one.name, one.grid, one.threads, list(one.arguments), one.shared, stream)


@dataclass(frozen=True)
class Sizes:
    """What is run. shapes: of models that are compared with the reference; copied, sent: bytes; layer, stack: what is
    decoded with random weights; histories: tokens that attention reads; vocab: of sampled rows; tokens: that an engine
    says; rounds: of each timing."""

    shapes: dict[str, Shape]
    copied: int
    sent: tuple[int, ...]
    slab: int
    layer: Shape
    stack: Shape
    histories: tuple[int, ...]
    vocab: tuple[int, ...]
    tokens: int
    rounds: int


@dataclass
class Machine:
    """driver: makes a new one; backend: its name for an engine; model: a folder that engines are loaded from."""

    driver: Callable[[], Any]
    clock: Clock
    backend: str
    sizes: Sizes
    model: Path
    compile: Callable[[Any, str], object]
    ceilings: dict[str, float]  # GB/s, by what was measured

    @contextmanager
    def device(self) -> Iterator[Device]:
        """One device, given back at the end."""
        device = Device(self.driver())
        try:
            yield device
        finally:
            device.close()


def card(sizes: Sizes, model: Path, ceilings: dict[str, float]) -> Machine:
    """The process's GPU."""
    import cupy

    return Machine(CupyDriver, CardClock(cupy), "cuda", sizes, model, CupyDriver.compile, ceilings)


def simulated(sizes: Sizes, model: Path, ceilings: dict[str, float]) -> Machine:
    """The simulator, for tests of the sections."""
    return Machine(lambda: simulator.SimDriver("random", 3), WallClock(), "sim", sizes, model,
                   lambda _, file: simulator.simulated(file), ceilings)  # fmt: skip
