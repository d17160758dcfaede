"""Which instruction-set levels the CPU kernels can be compiled for and run with on this machine."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from ..errors import ConfigError

_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux, x86-64: ARCH_REQ_XCOMP_PERM
LEVELS = ("amx", "avx512", "avx2", "dotprod", "neon", "plain")  # best first

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mf16c")
FLAGS = {
    "amx": (*_AVX512, "-DAMX"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "dotprod": ("-march=armv8.2-a+dotprod", "-DDOTPROD"),
    "neon": ("-DNEON",),  # by name: compilers for aarch64 have it on, and plain C must stay plain
    "plain": (),
}
_HAS_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "f16c", "avx2"}
_NEEDS = {
    "amx": _HAS_AVX512 | {"amx_tile", "amx_int8"},
    "avx512": _HAS_AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "dotprod": {"asimddp"},
    "neon": set[str](),  # every aarch64 has it
}
_X86, _ARM = ("amx", "avx512", "avx2"), ("dotprod", "neon")
_OF_MACHINE = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}


@cache
def available() -> tuple[str, ...]:
    """The levels this processor runs, best first; "plain" always."""
    levels = _OF_MACHINE.get(platform.machine().lower(), ())
    flags = _processor_flags() if levels else set()
    there = [level for level in levels if _NEEDS[level] <= flags]
    if "amx" in there and not _tiles_allowed():
        there.remove("amx")
    return (*there, "plain")


def _tiles_allowed() -> bool:
    """Ask Linux for AMX's registers, once for all threads of this process; it may refuse (some virtual machines do)."""
    try:
        system = ctypes.CDLL(None, use_errno=True)
        return bool(system.syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False


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
        if line.startswith(("flags", "Features")):  # x86, Arm
            return set(line.split(":", 1)[1].split())
    return set()


def _mac_flags() -> set[str]:
    command = ["sysctl", "machdep.cpu.features", "machdep.cpu.leaf7_features", "hw.optional.arm.FEAT_DotProd"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        return set()  # no way to ask: the plain level runs everywhere
    flags = set(text.lower().split())
    flags |= {"avx512_vnni"} if "avx512vnni" in flags else set()
    return flags | ({"asimddp"} if "feat_dotprod: 1" in text.lower() else set())
