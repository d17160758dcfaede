"""Which backend runs, and why: a named one or an error, `auto` with its reason."""

from __future__ import annotations

from . import gpu
from .build import KernelError
from .cpu import CpuBackend
from .cuda import CudaBackend
from .cuda_experts import Sharing
from .device import Device
from .driver_cupy import CupyDriver
from .reference import ReferenceBackend
from .simulator import SimDevice
from .types import Backend

NAMES = ("auto", "cuda", "cpu", "reference", "sim")


class NoGpu(KernelError):
    """A GPU was asked for by name, and something that it needs is missing; the message says what and how to get it."""


def choose_backend(name: str = "auto", precision: str = "fast", threads: int | None = None,
                   sharing: Sharing | None = None, reset: bool = False,
                   graphs: bool = True) -> tuple[Backend, str]:  # fmt: skip
    """(backend, one line saying why it and not another). threads None: all processors this process may use.

    sharing: of experts between device and processor; reset: see Driver.close; graphs: whether decode steps may be
    captured; other backends use none of them. ValueError
    for an unknown name; NoGpu when "cuda" is asked for and there is none to use; KernelError when "cpu" is asked for
    and cannot be compiled, or "sim" cannot run here. "sim" is for tests: the CUDA kernels, thread by thread on the CPU,
    very slow.
    """
    if name not in NAMES:
        raise ValueError(f"backend {name!r} is none of {', '.join(NAMES)}")
    if name == "reference":
        return ReferenceBackend(precision), "asked for by name"
    if name == "sim":
        why = "asked for by name; CUDA kernels simulated on the CPU, for tests"
        return CudaBackend(SimDevice(), precision, sharing, graphs), why
    lacking = gpu.trouble() if name in ("auto", "cuda") else None
    if name == "cuda" and lacking is not None:
        raise NoGpu(f"backend: cuda: {lacking.says}; {lacking.do}")
    asked = "asked for by name" if lacking is None else lacking.says
    if name != "cpu" and lacking is None:
        driver = CupyDriver()
        why = "asked for by name" if name == "cuda" else "there is a GPU"
        return CudaBackend(Device(driver, reset), precision, sharing, graphs), f"{why}; {gpu.in_words(driver.facts())}"
    try:
        cpu = CpuBackend(precision, threads)
    except KernelError as error:
        if name == "cpu":
            raise
        return ReferenceBackend(precision), f"{asked}; the CPU kernels could not be built: {error}"
    return cpu, f"{asked}; kernels for {cpu.isa}, {cpu.threads} thread{'s' if cpu.threads > 1 else ''}"
