"""Which instruction-set levels the CPU kernels can be compiled for and run with on this machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from ..errors import ConfigError

LEVELS = ("avx512", "avx2", "plain")  # best first

FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mf16c"),
    "avx2": ("-mavx2", "-mf16c"),
    "plain": (),
}
_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "f16c", "avx2"},
    "avx2": {"avx2", "f16c"},
    "plain": set[str](),
}


@cache
def available() -> tuple[str, ...]:
    """The levels this processor runs, best first; "plain" always."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ("plain",)
    flags = _processor_flags()
    return tuple(level for level in LEVELS if _NEEDS[level] <= flags)


def choose(level: str | None = None) -> str:
    """`level`, else the environment's COLIBRI_ISA, else the best. ConfigError for one this processor does not run."""
    named = os.environ.get("COLIBRI_ISA")
    wanted, source = level or named or available()[0], "ISA level" if level or not named else "COLIBRI_ISA"
    if wanted not in LEVELS:
        raise ConfigError(f"{source}: {wanted!r} is none of {', '.join(LEVELS)}")
    if wanted not in available():
        raise ConfigError(f"{source}: this processor does not run {wanted}; it runs {', '.join(available())}")
    return wanted


def _processor_flags() -> set[str]:
    """Flags as Linux names them; the kernel lists only those it has enabled."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return _mac_flags()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _mac_flags() -> set[str]:
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        return set()  # no way to ask: the plain level runs everywhere
    flags = set(text.lower().split())
    return flags | ({"avx512_vnni"} if "avx512vnni" in flags else set())
