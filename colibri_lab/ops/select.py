"""Which backend runs, and why: a named one or an error, `auto` with its reason."""

from __future__ import annotations

from .build import KernelError
from .cpu import CpuBackend
from .cuda import CudaBackend
from .reference import ReferenceBackend
from .simulator import SimDevice
from .types import Backend

NAMES = ("auto", "cpu", "reference", "sim")
LATER = ("cuda",)


def choose_backend(name: str = "auto", precision: str = "fast", threads: int | None = None) -> tuple[Backend, str]:
    """(backend, one line saying why it and not another). threads None: all processors this process may use.

    ValueError for an unknown or not yet available name; KernelError when "cpu" is asked for and cannot be compiled,
    or "sim" cannot run here. "sim" is for tests: the CUDA kernels, thread by thread on the CPU, very slow.
    """
    if name in LATER:
        raise ValueError(f"backend {name!r} is not available yet; use one of {', '.join(NAMES)}")
    if name not in NAMES:
        raise ValueError(f"backend {name!r} is none of {', '.join(NAMES + LATER)}")
    if name == "reference":
        return ReferenceBackend(precision), "asked for by name"
    if name == "sim":
        return CudaBackend(SimDevice(), precision), "asked for by name; CUDA kernels simulated on the CPU, for tests"
    try:
        cpu = CpuBackend(precision, threads)
    except KernelError as error:
        if name == "cpu":
            raise
        return ReferenceBackend(precision), f"the CPU kernels could not be built: {error}"
    level = f"kernels for {cpu.isa}, {cpu.threads} thread{'s' if cpu.threads > 1 else ''}"
    return cpu, f"{'asked for by name' if name == 'cpu' else 'cuda is not available yet'}; {level}"
