"""Holding torch to an instruction level: what its libraries are told before they start, and what they then say.

Three parts of torch choose their instructions by themselves: its own kernels (ATEN_CPU_CAPABILITY), oneDNN, which
multiplies bf16 matrices (ONEDNN_MAX_CPU_ISA; "CPU Dispatcher Control" in oneDNN's developer guide), and MKL, which does
attention's (MKL_ENABLE_INSTRUCTIONS; "Instruction Set-Specific Dispatching" in oneMKL's developer guide). Each ignores
a name that it does not know without a word, so the child asks all three; and since a process must ask Linux for AMX's
registers before it uses them, the child asks Linux too. Standard library alone, as the child's interpreter has it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

_ARCH_PRCTL, _ALLOWED, _TILE_DATA = 158, 0x1022, 18  # Linux, x86-64: ARCH_GET_XCOMP_PERM
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
LEVELS: dict[str, dict[str, str]] = {
    "amx": {},
    # the widest of each without AMX: oneDNN's next is AVX512_CORE_AMX, MKL's AVX512_E4
    "avx512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
_WIDER = {"avx512": re.compile("AMX"), "avx2": re.compile(r"AMX|AVX-?512|AVX ?10")}


def told(isa: str | None) -> dict[str, str]:
    """Environment variables that hold torch to one of our ISA levels; none for None and amx: it takes what it finds.

    ValueError for a level that torch cannot be held to, and where the environment says another thing than the level.
    """
    if isa is None:
        return {}
    if isa not in LEVELS:
        why = (
            "oneDNN has no level below SSE4.1"
            if isa == "plain"
            else "oneDNN and MKL name levels of x86 processors alone"
        )
        raise ValueError(f"--isa {isa} beside transformers: {why}; it can be held to {', '.join(LEVELS)}")
    wanted = LEVELS[isa]
    for name in VARIABLES:
        given = os.environ.get(name)
        if given is not None and given.lower() != wanted.get(name, "").lower():
            takes = f"takes {wanted[name]}" if name in wanted else "leaves it unset"
            raise ValueError(f"{name}={given} is set, and --isa {isa} {takes}: unset it, or leave --isa out")
    return wanted


@dataclass(frozen=True)
class Said:
    """What torch (AVX512, AVX2, ...), oneDNN and MKL say of themselves, in their words; "none": torch is without it."""

    torch: str
    onednn: str
    mkl: str

    def __str__(self) -> str:
        own = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
        return f"torch's kernels {self.torch}, oneDNN {self.onednn}, MKL {self.mkl} ({' '.join(own) or 'not held'})"


def ask(torch: Any) -> Said:
    """Let both libraries do a little in float32 with their reports on, and read what they print."""
    has = {name: getattr(torch.backends, name).is_available() for name in ("mkldnn", "mkl")}
    with _printed() as lines, ExitStack() as reports:
        for name in (name for name in has if has[name]):
            library = getattr(torch.backends, name)
            reports.enter_context(library.verbose(library.VERBOSE_ON))
        few = torch.ones(64, 64)
        few @ few
        if has["mkldnn"]:
            torch.nn.functional.linear(few.to_mkldnn(), few.to_mkldnn())
    text = "\n".join(lines)
    onednn = re.search(r"cpu,isa:(.*)", text)
    mkl = re.search(r"MKL_VERBOSE .*?(?:architecture|processors) (.*?), (?:Lnx|Win|OSX)", text)
    return Said(
        torch.backends.cpu.get_cpu_capability(),
        (onednn[1].strip() if onednn else "silent") if has["mkldnn"] else "none",
        (re.sub(r"Intel\(R\) |\(R\)", "", mkl[1]) if mkl else "silent") if has["mkl"] else "none",
    )


def check(isa: str | None, said: Said) -> None:
    """RuntimeError where one of them was to be held to `isa` and is not, or does not say."""
    if isa is None or not LEVELS[isa]:
        return
    if said.torch.lower() != isa:
        raise RuntimeError(f"torch's own kernels are {said.torch}, not {isa}: ATEN_CPU_CAPABILITY was not taken")
    for name, words, variable in (("oneDNN", said.onednn, VARIABLES[0]), ("MKL", said.mkl, VARIABLES[2])):
        if words == "silent" or _WIDER[isa].search(words):
            raise RuntimeError(f"{name} was to be held to {isa} and says {words!r}: {variable} was not taken")


def check_tiles(isa: str | None) -> None:
    """RuntimeError where this process was given AMX's registers though it was to be held below."""
    if isa is not None and LEVELS[isa] and tiles():
        raise RuntimeError(f"something in torch asked Linux for AMX's registers, though it was to be held to {isa}")


def tiles() -> bool:
    """May this process use AMX's registers? Only one that asked Linux (5.16 or later) may; None asked: not used."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    allowed = ctypes.c_uint64(0)
    known = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ALLOWED, ctypes.byref(allowed)) == 0
    return known and bool(allowed.value >> _TILE_DATA & 1)


@contextmanager
def _printed() -> Iterator[list[str]]:
    """Lines that C libraries print to standard output meanwhile, once it is over."""
    lines: list[str] = []
    flush = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as file:
        flush(None)
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        lines += file.read().decode(errors="replace").splitlines()
