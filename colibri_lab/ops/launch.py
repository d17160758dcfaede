"""CUDA kernels as text, and their launches: checked against the text itself, whatever device they run on.

A kernel file is bundled with what it includes into one text, since a compiler's cache that is keyed by the text alone
must see every change. `Kernels` launches by name on a `Device`: a GPU's, or the simulator's. Arrays are the device's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..paths import kernels_dir
from .device import Device

FORMATS = ("Single", "Half", "Int8", "Int4")  # of tiles, in the order of layout.DTYPES
BATCHES = (1, 4)  # inputs that share a block's weights
LANE_DIMS = (1, 2, 4, 8)  # dimensions of a head for each lane of a warp
NUMBERS = ("half_t", "float")

# file -> the kernels and template instances that are launched
KERNELS: dict[str, tuple[str, ...]] = {
    "embed": (*(f"embed<{t}>" for t in NUMBERS), *(f"embed_tiles<{f}>" for f in FORMATS)),
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "quantise_rows": ("quantise_rows",),
    "matmul": (
        *(f"matmul_fast<{f}, {n}>" for f in ("Int8", "Int4") for n in BATCHES),
        *(f"matmul_exact<{f}, {n}>" for f in FORMATS for n in BATCHES),
    ),
    "project_heads": tuple(f"{name}<{t}>" for name in ("project_heads", "settle_rows") for t in NUMBERS),
    "attention": (*(f"attention<{t}, {n}>" for t in NUMBERS for n in LANE_DIMS), "attention_merge", "collect_sight"),
    "router": ("router_logits", "route_softmax", "route_int8_lut", "route_bit_level", "audit_choice"),
    "two_stage": ("row_codes", "code_bounds", "choose_candidates"),
    "plan_picks": ("plan_picks",),
    "expert_ffn": ("swiglu", "add_picks", "add_sum", "clear", "shared_weight"),
    "head": ("finish_logits",),
    "sample": ("sample",),
}
FILE_OF = {name: file for file, names in KERNELS.items() for name in names}

DTYPES: dict[str, Any] = {
    "float": np.float32,
    "double": np.float64,
    "half_t": np.float16,
    "int": np.int32,
    "i8": np.int8,
    "u8": np.uint8,
    "i16": np.int16,
    "u16": np.uint16,
    "i64": np.int64,
}
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
_KERNEL = re.compile(
    r"(?:template <([^>]*)>\s*)?__global__ void __launch_bounds__\((\d+)\)\s*(\w+)\(([^)]*)\)", re.DOTALL
)


class LaunchError(ValueError):
    """A launch that does not fit its kernel; the message names the kernel and the argument."""


@dataclass(frozen=True)
class Signature:
    """What a kernel takes: (name, dtype, is an array) for each parameter, and the most threads of a block."""

    parameters: tuple[tuple[str, np.dtype[Any], bool], ...]
    threads: int


def bundle(file: str, side: str = "device") -> str:
    """The text of `file`.cu with its includes in place, once each. side: the folder of clb.cuh, device or hostsim."""
    folder, seen, out = kernels_dir() / "cuda", set[str](), list[str]()

    def add(name: str) -> None:
        seen.add(name)
        path = next((p for p in (folder / name, folder / side / name) if p.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"{folder}: there is no {name}")
        out.append(f'#line 1 "{name}"')
        for number, line in enumerate(path.read_text("utf8").splitlines(), 2):
            included = _INCLUDE.match(line)
            if included is None:
                out.append("" if line.strip() == "#pragma once" else line)
            elif included[1] not in seen:
                add(included[1])
                out.append(f'#line {number} "{name}"')

    add(f"{file}.cu")
    return "\n".join(out) + "\n"


def signatures(file: str, text: str | None = None) -> dict[str, Signature]:
    """By name of each instance that KERNELS lists, read from the file (or `text`). LaunchError where they differ."""
    text = (kernels_dir() / "cuda" / f"{file}.cu").read_text("utf8") if text is None else text
    found = {name: (template, int(most), params) for template, most, name, params in _KERNEL.findall(text)}
    if set(found) != {name.split("<")[0] for name in KERNELS[file]}:
        raise LaunchError(f"{file}.cu has the kernels {', '.join(found)}, ops/launch.py lists others")
    made = {}
    for name in KERNELS[file]:
        base, _, chosen = name.rstrip(">").partition("<")
        template, most, params = found[base]
        types = [p.split()[-1] for p in template.split(",") if p]
        known = dict(zip(types, (c.strip() for c in chosen.split(",")), strict=True)) if types else {}
        made[name] = Signature(tuple(_parameter(p, known) for p in params.split(",")), most)
    return made


def _parameter(text: str, known: dict[str, str]) -> tuple[str, np.dtype[Any], bool]:
    words = text.replace("*", " * ").replace("__restrict__", "").replace("const", "").split()
    return words[-1], np.dtype(DTYPES[known.get(words[0], words[0])]), "*" in words


class Kernels:
    """Launches on one device, counted by kernel in `launches`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.launches: dict[str, int] = {}
        self._signatures: dict[str, Signature] = {}

    def __call__(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: Any, shared: int = 0) -> None:
        """A grid with no blocks launches nothing. LaunchError for what the kernel's text does not take."""
        file = FILE_OF[name]
        if name not in self._signatures:
            self._signatures |= signatures(file)
        signature = self._signatures[name]
        if not 1 <= threads <= signature.threads or threads % 32:
            raise LaunchError(f"{name}: {threads} threads, a block has whole warps and at most {signature.threads}")
        if len(arguments) != len(signature.parameters):
            raise LaunchError(f"{name}: {len(arguments)} arguments, the kernel has {len(signature.parameters)}")
        checked = [_checked(name, a, p) for a, p in zip(arguments, signature.parameters, strict=True)]
        if 0 in grid:
            return
        if grid[1] > 65535 or grid[2] > 65535:
            raise LaunchError(f"{name}: a grid of {grid} is more than a device takes")
        self.launches[name] = self.launches.get(name, 0) + 1
        self.device.run(file, name, grid, threads, checked, shared)


def _checked(kernel: str, given: Any, parameter: tuple[str, np.dtype[Any], bool]) -> Any:
    name, dtype, is_array = parameter
    if not is_array:
        if not isinstance(given, (int, float, np.generic)):
            raise LaunchError(f"{kernel}: {name} is a number, not {type(given).__name__}")
        return dtype.type(given)
    if getattr(given, "dtype", None) != dtype:
        raise LaunchError(f"{kernel}: {name} is an array of {dtype}, not of {getattr(given, 'dtype', type(given))}")
    if not given.flags.c_contiguous:
        raise LaunchError(f"{kernel}: {name} is not contiguous")
    return given
