"""How long a kernel takes on a card, where there is one; where there is none, what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from . import gpu
from .device import Device
from .driver_cupy import CupyDriver
from .examples import Example
from .launch import Kernels


@dataclass(frozen=True)
class Timing:
    """microseconds and gigabytes_per_s (each array of the launch once) are None where there is no GPU to use: `why`."""

    kernel: str
    why: str
    microseconds: float | None = None
    gigabytes_per_s: float | None = None

    def __str__(self) -> str:
        if self.microseconds is None:
            return self.why
        return f"{self.kernel}: {self.microseconds:.1f} us, {self.gigabytes_per_s:,.0f} GB/s on {self.why}"


def time_on_gpu(example: Example, rounds: int = 200) -> Timing:
    """A launch's share of `rounds` launches in a row, by the clock on the wall, after one that compiles; so what a
    launch costs the host counts where the kernel takes less. RuntimeError where the result is not the reference's."""
    lacking = gpu.trouble()
    if lacking is not None:
        return Timing(example.kernel, f"no GPU here: {lacking.says}")
    device = Device(CupyDriver())
    try:
        if wrong := example.differences(example.run(device)):
            raise RuntimeError(f"{example.kernel} on this card: {wrong[0]}")
        arguments, kernels = example.prepared(device), Kernels(device)
        some = next(a for a in arguments if getattr(a, "ndim", 0))
        device.read(some[:1])  # all that was asked for so far is done
        begin = perf_counter()
        for _ in range(rounds):
            example.launch(kernels, arguments)
        device.read(some[:1])
        seconds = (perf_counter() - begin) / rounds
        size = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arguments if getattr(a, "ndim", 0))
        return Timing(example.kernel, device.driver.facts().name, 1e6 * seconds, size / seconds / 1e9)
    finally:
        device.close()
