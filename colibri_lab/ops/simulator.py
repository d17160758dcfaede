"""A device for tests: the text of the CUDA kernels compiled for the CPU, one block at a time, each thread a fiber.

Memory is fenced (the byte after an array cannot be touched) and begins as 0xFF, which is NaN or -1; threads of a block
run in an order that a test chooses. It is slow, and says nothing of speed.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import mmap
import platform
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..memory import free_memory
from . import build
from .device import Device
from .driver import Facts, Host
from .launch import KERNELS, bundle

FLAGS = ("-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
         "-ffp-contract=off", "-fno-strict-aliasing", "-w")  # fmt: skip
# Each needs its runtime in the process (LD_PRELOAD), but for undefined; tests run them in children.
SANITIZERS = {
    "address": ("-fsanitize=address", "-O1", "-g", "-fno-omit-frame-pointer"),
    "undefined": ("-fsanitize=undefined,float-cast-overflow", "-O1", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread", "-O1", "-g", "-fno-omit-frame-pointer"),
}
ORDERS = {"forward": 0, "backward": 1, "random": 2}

# A launch, as `launch` takes it but for its stream.
Noted = tuple[str, str, tuple[int, int, int], int, list[Any], int]

one_at_a_time = threading.RLock()  # a compiled file has one machine
_libc = c.CDLL(None)


class SimulatedFault(RuntimeError):
    """What the simulator found wrong in a kernel: the kernel, block, thread and line."""


class SimDriver:
    """See driver.Driver. order: of threads and blocks (ORDERS); seed: of the random one; sanitizer: one of SANITIZERS.

    texts: of kernel files (launch.bundle with the side hostsim) in the place of those that are there. Everything is
    done when a call returns, so streams and events are only names; a graph is a list of launches. KernelError on
    anything but x86-64.
    """

    name = "sim"

    def __init__(self, order: str = "forward", seed: int = 1, sanitizer: str | None = None,
                 texts: Mapping[str, str] | None = None) -> None:  # fmt: skip
        if platform.machine() not in ("x86_64", "AMD64"):
            raise build.KernelError(
                f"the simulator of CUDA kernels runs on x86-64, this machine is {platform.machine()}"
            )
        self.order, self.seed, self._texts = ORDERS[order], seed, dict(texts or {})
        self._flags: tuple[str, ...] = SANITIZERS[sanitizer] if sanitizer else ()
        self._libraries: dict[str, c.CDLL] = {}
        self._noted: list[Noted] | None = None  # launches of a capture
        self._ran: set[str] = set()

    def facts(self) -> Facts:
        return Facts("simulator", free_memory(), free_memory(), (0, 0), 0, 0)

    def empty(self, shape: Sequence[int], dtype: Any) -> Host:
        self._not_captured("memory is taken")
        return fenced(shape, dtype)

    def free(self, array: Host) -> None:
        self._not_captured("memory is freed")

    def lock(self, host: Host) -> None:
        self._not_captured("memory is locked")

    def unlock(self, host: Host) -> None:
        self._not_captured("memory is unlocked")

    def stream(self) -> Any: ...

    def record(self, stream: Any) -> Any:
        self._not_captured("an event is recorded")

    def wait(self, stream: Any, event: Any) -> None:
        self._not_captured("an event is waited for")

    def happened(self, event: Any) -> bool:
        return True

    def synchronise(self, stream: Any) -> None:
        self._not_captured("a stream is waited for")

    def write(self, target: Host, host: Host, stream: Any) -> None:
        self._not_captured("something is copied")
        target[...] = host

    def read(self, host: Host, source: Host, stream: Any) -> None:
        self._not_captured("something is copied")
        host[...] = source

    def capture(self, stream: Any) -> None:
        self._not_captured("another capture begins")
        self._noted = []

    def captured(self, stream: Any) -> tuple[Noted, ...]:
        assert self._noted is not None, "no capture has begun"
        noted, self._noted = tuple(self._noted), None
        return noted

    def replay(self, graph: tuple[Noted, ...], stream: Any) -> None:
        self._not_captured("a graph is replayed")
        for file, name, grid, threads, arguments, shared in graph:
            self.launch(file, name, grid, threads, arguments, shared, stream)

    def address(self, array: Host) -> int:
        return int(array.ctypes.data)

    def _not_captured(self, what: str) -> None:
        if self._noted is not None:
            raise SimulatedFault(f"{what} inside a capture, which holds launches alone")

    def launch(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
               shared: int, stream: Any) -> None:  # fmt: skip
        if self._noted is not None:
            if name not in self._ran:
                raise SimulatedFault(f"{name}: a capture may not be a kernel's first launch, which loads it")
            self._noted.append((file, name, grid, threads, list(arguments), shared))
            return
        self._ran.add(name)
        library = self._library(file)
        pointers = (c.c_void_p * len(arguments))()
        keep = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        boxes = [np.array(value) for value in keep]
        for i, box in enumerate(boxes):
            pointers[i] = box.ctypes.data
        function = getattr(library, f"simulated_{KERNELS[file].index(name)}")
        shape = (c.c_uint * 6)(*grid, threads, 1, 1)
        with one_at_a_time:
            fine = function(shape, c.c_uint(shared), pointers, self.order, c.c_ulonglong(self.seed))
            error = b"" if fine else library.simulated_error()
        if not fine:
            raise SimulatedFault(f"{name}: {error.decode()}")

    def close(self, reset: bool) -> None:
        self._libraries.clear()

    def _library(self, file: str) -> c.CDLL:
        if file not in self._libraries:
            self._libraries[file] = simulated(file, self._flags, self._texts.get(file))
        return self._libraries[file]


class SimDevice(Device):
    """A device on the simulator; arguments of SimDriver."""

    def __init__(self, order: str = "forward", seed: int = 1, sanitizer: str | None = None,
                 texts: Mapping[str, str] | None = None) -> None:  # fmt: skip
        super().__init__(SimDriver(order, seed, sanitizer, texts))


def fenced(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An array of 0xFF bytes that ends where a page begins that cannot be touched."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    size = count * kind.itemsize
    pages = max(1, -(-size // mmap.PAGESIZE))
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = c.addressof(c.c_char.from_buffer(memory))
    if _libc.mprotect(c.c_void_p(start + pages * mmap.PAGESIZE), c.c_size_t(mmap.PAGESIZE), 0):
        raise MemoryError("cannot fence an array")
    array = np.frombuffer(memory, kind, count, pages * mmap.PAGESIZE - size).reshape(shape)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


def simulated(file: str, flags: tuple[str, ...] = (), text: str | None = None) -> c.CDLL:
    """The library of one kernel file (or of `text` in its place), out of the cache or compiled. KernelError."""
    text = wrapped(file, bundle(file, "hostsim") if text is None else text)
    command = [build.compiler(), *FLAGS, *flags]
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    key = hashlib.sha256("\0".join([*command, text]).encode() + version).hexdigest()[:20]
    more = ("-lgcc",) if "-nodefaultlibs" in flags else ()
    try:
        library = build.library([*command, "-", *more], f"sim-{file}-{key}", text)
    except build.KernelError as error:
        if "cc1plus" in str(error):
            raise build.KernelError(
                "the simulator of CUDA kernels needs a C++ compiler; on Debian and Ubuntu: apt install g++"
            ) from error
        raise
    library.simulated_error.restype = c.c_char_p
    return library


def wrapped(file: str, text: str) -> str:
    """The kernels in a nameless space of their own, and a C function for each instance."""
    exports = [f"SIM_EXPORT({i}, {name})" for i, name in enumerate(KERNELS[file])]
    return "\n".join([text, '#line 1 "exports"', "SIM_ERROR SIM_RECORDED", *exports, ""])
