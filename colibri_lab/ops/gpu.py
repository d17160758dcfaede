"""Whether a GPU can be used here, and if not, which of the things that it needs is missing and how to get it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .driver import DeviceFull, Facts
from .driver_cupy import CupyDriver, import_cupy

INSTALL = "pip install 'colibri-lab[cuda]'"
LEAST = (7, 5)  # compute capability that CUDA 13 compiles for
TRIED = "rms_norm"  # the kernel file that is compiled to see whether that works


@dataclass(frozen=True)
class Check:
    """One thing that a GPU needs. do: the way out where it is not fine."""

    what: str
    fine: bool
    says: str
    do: str = ""


def trouble() -> Check | None:
    """The first thing that is missing; None where a GPU can be used."""
    return next((check for check in checks() if not check.fine), None)


def checks(root: Path = Path("/")) -> Iterator[Check]:
    """What a GPU needs, one after the other, up to the first that is missing.

    root: of /proc. Asks the card for little: a few bytes, and one compilation that CuPy keeps.
    """
    for check in _needed(root):
        yield check
        if not check.fine:
            return


def _needed(root: Path) -> Iterator[Check]:
    driver = _driver(root)
    if find_spec("cupy") is None:
        yield driver
        yield Check("CuPy", False, "CuPy is not installed", INSTALL)
        return
    try:
        cupy = import_cupy()
        runtime, nvrtc = cupy.cuda.runtime, cupy.cuda.nvrtc
        version, made_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except Exception as error:  # a broken installation raises what it likes
        yield driver
        do = f"pip uninstall it under every name that pip list shows, and {INSTALL}"
        yield Check("CuPy", False, f"CuPy cannot be used ({_line(error)})", do)
        return
    yield _answering(driver, version, made_for)
    yield Check("CuPy", True, f"CuPy {cupy.__version__}, made for CUDA {_dotted(made_for)}")
    yield _cards(runtime)
    yield _nvrtc(nvrtc, made_for)
    yield from _tried()


def _answering(driver: Check, version: int, made_for: int) -> Check:
    """The driver that CuPy found: versions of CUDA, 0 for none; one that is newer than CuPy serves it too."""
    if version == 0 and driver.fine:
        return Check("driver", False, f"{driver.says} does not answer", "load its kernel module; nvidia-smi says more")
    if version == 0:
        return driver
    if version // 1000 < made_for // 1000:
        says = f"the NVIDIA driver is for CUDA {_dotted(version)}, CuPy for {_dotted(made_for)}"
        do = f"install a newer driver, or pip install cupy-cuda{version // 1000}x in place of this CuPy"
        return Check("driver", False, says, do)
    return Check("driver", True, f"{driver.says if driver.fine else 'a driver'}, for CUDA {_dotted(version)}")


def _driver(root: Path) -> Check:
    said = _text(root / "proc/driver/nvidia/version").partition("\n")[0].strip()
    if said:
        return Check("driver", True, said)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check("driver", False, "there is no NVIDIA driver here", "install the driver of the card")
    return Check("driver", True, "an NVIDIA driver (libcuda.so.1)")


def _cards(runtime: Any) -> Check:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    do = "nvidia-smi -L lists the cards that the driver sees"
    if hidden is not None:
        do = f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it, or name a card that there is"
    try:
        count = runtime.getDeviceCount()
    except Exception as error:
        return Check("cards", False, f"the driver finds no card ({_line(error)})", do)
    if not count:
        return Check("cards", False, "the driver finds no card", do)
    return Check("cards", True, f"{count} visible")


def _nvrtc(nvrtc: Any, made_for: int) -> Check:
    wanted = f"pip install 'nvidia-cuda-nvrtc=={made_for // 1000}.*'"
    try:
        major, minor = nvrtc.getVersion()
    except Exception as error:
        return Check("NVRTC", False, f"NVRTC, which compiles the kernels, cannot be loaded ({_line(error)})", wanted)
    if major != made_for // 1000:
        return Check("NVRTC", False, f"NVRTC {major}.{minor} does not match CuPy's CUDA {_dotted(made_for)}", wanted)
    return Check("NVRTC", True, f"NVRTC {major}.{minor}")


def _tried() -> Iterator[Check]:
    """The card itself: its facts, a compilation, a few bytes of its memory."""
    driver = CupyDriver()
    try:
        facts = driver.facts()
        driver.free(driver.empty((1,), "u1"))
    except DeviceFull:
        yield Check("card", False, "the card has no memory left", "see with nvidia-smi who uses it")
        return
    except Exception as error:
        yield Check(
            "card", False, f"the card does not work ({_line(error)})", "see with nvidia-smi what is wrong with it"
        )
        return
    able = facts.capability >= LEAST
    yield Check("card", able, in_words(facts) + ("" if able else f" is older than {LEAST[0]}.{LEAST[1]}"),
                "backend: cpu runs everywhere")  # fmt: skip
    if not able:
        return
    yield compiles(facts.capability, facts.runtime)


@cache
def compiles(capability: tuple[int, int], made_for: int) -> Check:
    """Whether NVRTC takes a kernel; tried once a process, since a compiler does not change while it runs."""
    driver = CupyDriver()
    try:
        driver.compile(TRIED)
    except Exception as error:
        said, lost = _line(error), "cannot open source file" in str(error) or "header" in str(error).lower()
        what = "finds no headers of the toolkit" if lost else "refuses the kernels"
        do = f"pip install 'cupy-cuda{made_for // 1000}x[ctk]'" if lost else "install the NVRTC of CuPy's CUDA"
        return Check("kernels", False, f"NVRTC {what} for sm_{capability[0]}{capability[1]} ({said})", do)
    finally:
        driver.close(reset=False)
    return Check("kernels", True, "NVRTC compiles them, without any header of the toolkit")


def locked_limit() -> tuple[int | None, str]:
    """(bytes of memory that a process may lock, in words); None: no limit."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (ImportError, OSError):
        return None, "not known here"
    if soft == resource.RLIM_INFINITY:
        return None, "no limit"
    return soft, f"{soft / 2**20:.4g} MiB (ulimit -l)"


def in_words(facts: Facts) -> str:
    """A card, its memory and its compute capability."""
    gib = f"{facts.memory / 2**30:.1f} GiB, {facts.free / 2**30:.1f} free"
    return f"{facts.name}, {gib}, compute capability {facts.capability[0]}.{facts.capability[1]}"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _line(error: BaseException) -> str:
    """An error's first line, short."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:160]}" if said[0] else type(error).__name__


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
