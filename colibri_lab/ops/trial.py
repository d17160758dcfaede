"""A kernel's text, changed: compiled for the simulator, run in several thread orders, compared with the reference.

A race shows as a result that depends on the order, or as a read of memory that nobody has written: it begins as 0xFF.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..paths import kernels_dir
from .examples import Array, Example
from .launch import bundle, signatures
from .recording import RecordingDevice
from .simulator import SimDevice, SimulatedFault

ORDERS = (("forward", 1), ("backward", 1), ("random", 1), ("random", 2), ("random", 3))


@dataclass(frozen=True)
class Verdict:
    """found: one line for each thing that is wrong, none for a kernel that is right in every order."""

    kernel: str
    orders: int
    found: tuple[str, ...]

    @property
    def right(self) -> bool:
        return not self.found

    def __str__(self) -> str:
        if self.right:
            return f"{self.kernel}: right in {self.orders} orders of threads"
        return "\n".join([f"{self.kernel}: {len(self.found)} findings in {self.orders} orders of threads", *self.found])


def source(file: str) -> str:
    """The text of kernels/cuda/`file`, such as rms_norm.cu or common.cuh. FileNotFoundError names it."""
    return (kernels_dir() / "cuda" / file).read_text("utf8")


def changed(file: str, old: str, new: str, nth: int = 0) -> str:
    """The whole text of a kernel file with its includes, for the simulator, its `nth` piece `old` replaced by `new`.

    ValueError where there is no such piece.
    """
    parts = bundle(file, "hostsim").split(old)
    if not old or len(parts) < nth + 2:
        raise ValueError(f"{file}.cu and what it includes have {len(parts) - 1} times {old!r}, not {nth + 1}")
    return old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])


def check(example: Example, text: str | None = None) -> Verdict:
    """Run an example in all ORDERS, with `text` in the place of its file, and say what is not as it should be.

    KernelError where the text does not compile: the compiler's words, with the line. ValueError where it takes other
    parameters than the file's kernel.
    """
    if text is not None and signatures(example.file, text) != signatures(example.file):
        raise ValueError(f"{example.kernel}: the changed text takes other parameters than the example gives")
    texts = {} if text is None else {example.file: text}
    found: list[str] = []
    first: dict[str, Array] | None = None
    for order, seed in ORDERS:
        name = f"{order} {seed}" if order == "random" else order
        try:
            got = example.run(SimDevice(order, seed, texts=texts))
        except SimulatedFault as fault:
            found.append(f"{name}: {fault}")
            continue
        wrong = example.differences(got)
        first = first or got
        found += [f"{name}: {said}" for said in wrong or _other_bits(got, first)]
    if found:
        device = RecordingDevice(texts=texts)
        try:
            example.run(device)
        except SimulatedFault:  # said above already
            return Verdict(example.kernel, len(ORDERS), tuple(found))
        found += [str(conflict) for conflict in device.recordings[0].conflicts()]
    return Verdict(example.kernel, len(ORDERS), tuple(found))


def _other_bits(got: dict[str, Array], first: dict[str, Array]) -> list[str]:
    """Near enough to the reference, but not what the first order of threads gave: a sum without an order."""
    said = []
    for name in (n for n in got if not np.array_equal(got[n], first[n], equal_nan=True)):
        at = tuple(int(i) for i in np.argwhere(got[name] != first[name])[0])
        place = ", ".join(map(str, at))
        said.append(f"{name}[{place}] is {got[name][at]:.9g}, in the first order {first[name][at]:.9g}")
    return said
