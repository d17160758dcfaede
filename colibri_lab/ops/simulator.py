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
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import build
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

_lock = threading.Lock()  # a compiled file has one machine
_libc = c.CDLL(None)


class SimulatedFault(RuntimeError):
    """What the simulator found wrong in a kernel: the kernel, block, thread and line."""


class SimDevice:
    """See launch.Device. order: of threads and blocks (ORDERS); seed: of the random one; sanitizer: one of SANITIZERS.

    KernelError on anything but x86-64.
    """

    name = "sim"

    def __init__(self, order: str = "forward", seed: int = 1, sanitizer: str | None = None) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise build.KernelError(
                f"the simulator of CUDA kernels runs on x86-64, this machine is {platform.machine()}"
            )
        self.order, self.seed, self._sanitizer = ORDERS[order], seed, sanitizer
        self._libraries: dict[str, c.CDLL] = {}

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        return fenced(shape, dtype)

    def write(self, target: np.ndarray[Any, Any], host: np.ndarray[Any, Any]) -> None:
        if target.shape != host.shape or target.dtype != host.dtype:
            raise ValueError(f"{host.dtype} {host.shape} does not go into {target.dtype} {target.shape}")
        target[...] = host

    def read(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array.copy()

    def run(self, file: str, name: str, grid: tuple[int, int, int], threads: int, arguments: list[Any],
            shared: int) -> None:  # fmt: skip
        if file not in self._libraries:
            self._libraries[file] = simulated(file, self._sanitizer)
        library = self._libraries[file]
        pointers = (c.c_void_p * len(arguments))()
        keep = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
        boxes = [np.array(value) for value in keep]
        for i, box in enumerate(boxes):
            pointers[i] = box.ctypes.data
        launch = getattr(library, f"simulated_{KERNELS[file].index(name)}")
        shape = (c.c_uint * 6)(*grid, threads, 1, 1)
        with _lock:
            fine = launch(shape, c.c_uint(shared), pointers, self.order, c.c_ulonglong(self.seed))
            error = b"" if fine else library.simulated_error()
        if not fine:
            raise SimulatedFault(f"{name}: {error.decode()}")

    def close(self) -> None:
        self._libraries.clear()


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


def simulated(file: str, sanitizer: str | None = None) -> c.CDLL:
    """The library of one kernel file, out of the cache or compiled. KernelError."""
    text = wrapped(file, bundle(file, "hostsim"))
    command = [build.compiler(), *FLAGS, *(SANITIZERS[sanitizer] if sanitizer else ())]
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    key = hashlib.sha256("\0".join([*command, text]).encode() + version).hexdigest()[:20]
    library = build.library([*command, "-"], f"sim-{file}-{key}", text)
    library.simulated_error.restype = c.c_char_p
    return library


def wrapped(file: str, text: str) -> str:
    """The kernels in a nameless space of their own, and a C function for each instance."""
    exports = [f"SIM_EXPORT({i}, {name})" for i, name in enumerate(KERNELS[file])]
    return "\n".join([text, '#line 1 "exports"', "SIM_ERROR", *exports, ""])
