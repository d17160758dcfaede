"""A card, through CuPy: the one file that imports it. Nothing here computes; kernels are text that NVRTC compiles.

Only calls that need no header and no kernel of CuPy's own: a toolkit that is missing or does not match cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .driver import CannotLock, DeviceFull, Facts, Host
from .launch import KERNELS, bundle

OPTIONS = ("--std=c++17", "--fmad=false")  # no fused multiply-add unless written: instances then agree in bits
MOST_SHARED = 48 << 10  # bytes of shared memory that a kernel gets without asking
NO_MEMORY = 2  # cudaErrorMemoryAllocation
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


def import_cupy() -> Any:
    """The module. ImportError, or whatever a broken installation raises."""
    import cupy

    return cupy


class CupyDriver:
    """See driver.Driver. The process's current card, which CUDA_VISIBLE_DEVICES chooses."""

    name = "cuda"

    def __init__(self) -> None:
        self._cupy = import_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._card = self._runtime.getDevice()
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}

    def facts(self) -> Facts:
        about, (free, total) = self._runtime.getDeviceProperties(self._card), self._runtime.memGetInfo()
        return Facts(about["name"].decode(), total, free, (about["major"], about["minor"]),
                     self._runtime.driverGetVersion(), self._runtime.runtimeGetVersion())  # fmt: skip

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        kind = np.dtype(dtype)
        size = max(1, prod(shape) * kind.itemsize)
        try:
            address = self._runtime.malloc(size)
        except self._runtime.CUDARuntimeError as error:
            if error.status != NO_MEMORY:
                raise
            raise DeviceFull(size, self._runtime.memGetInfo()[0]) from error
        memory = self._cupy.cuda.UnownedMemory(address, size, self, self._card)
        return self._cupy.ndarray(tuple(shape), kind, self._cupy.cuda.MemoryPointer(memory, 0))

    def free(self, array: Any) -> None:
        self._runtime.free(array.data.ptr)

    def lock(self, host: Host) -> None:
        try:
            self._runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
        except self._runtime.CUDARuntimeError as error:
            raise CannotLock(host.nbytes, str(error)) from error

    def unlock(self, host: Host) -> None:
        self._runtime.hostUnregister(host.ctypes.data)

    def stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def happened(self, event: Any) -> bool:
        return bool(event.done)

    def synchronise(self, stream: Any) -> None:
        stream.synchronize()

    def write(self, target: Any, host: Host, stream: Any) -> None:
        self._runtime.memcpyAsync(target.data.ptr, host.ctypes.data, host.nbytes, TO_DEVICE, stream.ptr)

    def read(self, host: Host, source: Any, stream: Any) -> None:
        self._runtime.memcpyAsync(host.ctypes.data, source.data.ptr, host.nbytes, TO_HOST, stream.ptr)

    def launch(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
               shared: int, stream: Any) -> None:  # fmt: skip
        function = self._functions.get(name) or self._function(file, name)
        if shared > MOST_SHARED:
            function.max_dynamic_shared_size_bytes = shared
        with stream:
            function(grid, (threads, 1, 1), tuple(arguments), shared_mem=shared)

    def capture(self, stream: Any) -> None:
        stream.begin_capture()

    def captured(self, stream: Any) -> Any:
        return stream.end_capture()

    def replay(self, graph: Any, stream: Any) -> None:
        graph.launch(stream)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def compile(self, file: str) -> None:
        """All instances of a file, now. Whatever CuPy raises where NVRTC is missing or refuses the text."""
        module = self._cupy.RawModule(code=bundle(file), options=OPTIONS, name_expressions=KERNELS[file])
        module.compile()
        self._modules[file] = module

    def close(self, reset: bool) -> None:
        self._functions.clear()
        self._modules.clear()
        if reset:
            self._cupy.clear_memo()  # CuPy keeps compiled modules, which belong to the context
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()
            self._cupy.cuda.driver.devicePrimaryCtxRelease(self._card)

    def _function(self, file: str, name: str) -> Any:
        if file not in self._modules:
            self.compile(file)
        function = self._functions[name] = self._modules[file].get_function(name)
        return function
