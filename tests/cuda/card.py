"""A card that is not there: a module `cupy` over the simulator, which keeps a record and does work as late as it may.

A stream's work waits until somebody waits for it, so a copy that no event orders comes too late, and is seen: memory
begins as 0xFF. Calls are counted, and any of them can fail or be interrupted. The text that is compiled must be the one
that a card would get.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.machinery
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops import gpu
from colibri_lab.ops.launch import KERNELS, bundle
from colibri_lab.ops.simulator import SimDriver, fenced
from colibri_lab.paths import kernels_dir

from .card_streams import Event, Graph, Stream

LATE = ("everything", "kernels", "nothing")


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


@functools.cache
def texts(folder: Path) -> dict[str, str]:
    """The text that a card gets -> its file, for the kernels of a folder (`kernels_dir`)."""
    return {bundle(file): file for file in KERNELS}


class Array(np.ndarray):
    """Device memory, seen as an array of CuPy's is."""

    @property
    def data(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Module:
    def __init__(self, card: Card, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]) -> None:
        self.card = card
        self.file = texts(kernels_dir())[code]
        assert options == ("--std=c++17", "--fmad=false") and name_expressions == KERNELS[self.file]

    def compile(self) -> None:
        self.card.call("compile", self.file)
        if self.card.compile_error:
            raise self.card.compile_error

    def get_function(self, name: str) -> Callable[..., None]:
        def function(grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            stream, kept = self.card.current[-1], list(args)
            self.card.call("launch", stream.ptr, name)
            stream.launch(self.file, name, grid, block[0], kept, shared_mem)

        assert name in KERNELS[self.file]
        return function


class Card:
    """late: what is done as late as it may be: everything, or kernels (transfers at once), or nothing. memory: bytes
    that there are. error_at, interrupt_at: number of the call that fails with an error of CUDA, or brings Ctrl-C."""

    def __init__(self, late: str = "everything", memory: int = 1 << 31, **about: Any) -> None:
        self.late, self.memory = late, memory
        self.driver, self.runtime, self.nvrtc = 13010, 13020, (13, 0)
        self.count, self.capability = 1, (9, 0)
        self.compile_error: Exception | None = None
        self.lock_error = self.count_error = self.nvrtc_error = None
        self.fail_malloc: int | None = None
        self.error_at: int | None = None
        self.interrupt_at: int | None = None
        for name, value in about.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.log: list[tuple[Any, ...]] = []
        self.calls = self.mallocs = 0
        self.taken: dict[int, Any] = {}
        self.locked: dict[int, int] = {}
        self.reading: set[int] = set()  # copies from locked memory that are not done
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.current: list[Stream] = []
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.loaded: set[str] = set()
        self.sim = SimDriver("random", 7)
        self._numbers = iter(range(1, 1 << 30))

    def number(self) -> int:
        return next(self._numbers)

    def note(self, *what: Any) -> None:
        if what[0] in ("free", "unlock"):
            self.outside(what[0])
        self.log.append(what)

    def call(self, *what: Any) -> None:
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt
        if self.calls == self.error_at:
            raise CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")
        self.outside(what[0])
        self.log.append(what)

    def outside(self, what: str) -> None:
        """A capture holds launches and nothing else."""
        within = what in ("launch", "captured") or all(s.captured is None for s in self.streams)
        assert within, f"{what} inside a capture"

    @property
    def clean(self) -> bool:
        """Whether nothing of it is held any more; an error's traceback may be garbage that holds a stream."""
        gc.collect(1)
        return not self.taken and not self.locked and not list(self.streams) and not list(self.graphs)

    def catch_up(self) -> None:
        for stream in self.streams:
            stream.queue.catch_up()

    def malloc(self, size: int) -> int:
        self.mallocs += 1
        if self.mallocs == self.fail_malloc or sum(map(len, self.taken.values())) + size > self.memory:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        self.call("malloc", size)
        memory = fenced((size,), np.uint8)
        self.taken[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        self.note("free", len(self.taken[address]))
        assert all(s.queue.idle for s in self.streams), "freed while a stream has work to do"
        assert not list(self.graphs), "freed while a graph knows of it"
        del self.taken[address]

    def register(self, address: int, size: int, flags: int) -> None:
        if self.lock_error:
            raise self.lock_error
        self.call("lock", size)
        assert address % 4096 == 0 and flags == 0
        assert not any(a < address + size and address < a + s for a, s in self.locked.items()), "locked twice"
        self.locked[address] = size

    def unregister(self, address: int) -> None:
        self.note("unlock", self.locked.pop(address))
        assert not self.reading, "let go while a copy reads it"

    def copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self.call(("", "send", "fetch")[kind], stream, size)
        found = next(s for s in self.streams if s.ptr == stream)
        if kind == 2:  # memory of the host that is not locked is written when the call returns
            found.give(lambda: ctypes.memmove(target, source, size) and None)
            found.queue.catch_up()
        elif any(a <= source and source + size <= a + s for a, s in self.locked.items()):
            self.reading.add(number := self.number())

            def late() -> None:
                ctypes.memmove(target, source, size)
                self.reading.remove(number)

            found.give(late)
        else:  # what is not locked has been read when the call returns
            kept = ctypes.string_at(source, size)
            found.give(lambda: ctypes.memmove(target, kept, size) and None)

    def release(self, number: int) -> None:
        self.note("release context", number)
        assert self.clean, "the context goes before what lies in it"

    def new_stream(self, non_blocking: bool) -> Stream:
        assert non_blocking
        self.call("stream")
        stream = Stream(self)
        self.streams.add(stream)
        return stream

    def get_count(self) -> int:
        if self.count_error:
            raise self.count_error
        return self.count

    def get_nvrtc(self) -> tuple[int, int]:
        if self.nvrtc_error:
            raise self.nvrtc_error
        return self.nvrtc

    def module(self) -> ModuleType:
        """What `import cupy` gives."""
        made = ModuleType("cupy")
        made.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        left = self.memory - sum(map(len, self.taken.values()))
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError, getDevice=lambda: 0, getDeviceCount=self.get_count,
            driverGetVersion=lambda: self.driver, runtimeGetVersion=lambda: self.runtime, malloc=self.malloc,
            free=self.free, hostRegister=self.register, hostUnregister=self.unregister, memcpyAsync=self.copy,
            memGetInfo=lambda: (left, self.memory),
            getDeviceProperties=lambda number: {"name": b"Fake H0", "major": self.capability[0],
                                                "minor": self.capability[1]},
        )  # fmt: skip
        pool = SimpleNamespace(free_all_blocks=lambda: self.note("free pools"))
        cuda = SimpleNamespace(
            runtime=runtime, nvrtc=SimpleNamespace(getVersion=self.get_nvrtc),
            driver=SimpleNamespace(devicePrimaryCtxRelease=self.release), Stream=self.new_stream,
            Event=lambda disable_timing: Event(self), UnownedMemory=lambda address, size, owner, card: address,
            MemoryPointer=lambda address, offset: address + offset,
        )  # fmt: skip
        more = {
            "__version__": "14.0.0", "cuda": cuda, "ndarray": self.array, "clear_memo": lambda: self.note("forget"),
            "RawModule": lambda **how: Module(self, **how), "get_default_memory_pool": lambda: pool,
            "get_default_pinned_memory_pool": lambda: pool,
        }  # fmt: skip
        for name, value in more.items():
            setattr(made, name, value)
        return made

    def array(self, shape: tuple[int, ...], dtype: Any, address: int) -> Array:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.taken[address][:count].view(dtype).reshape(shape).view(Array)


def plug_in(monkeypatch: pytest.MonkeyPatch, card: Card) -> Card:
    """From now on `import cupy` finds this card."""
    monkeypatch.setitem(sys.modules, "cupy", card.module())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu.compiles.cache_clear()  # another card's
    return card
