"""Machines: what the cost model has to know of one, and boards that people ask about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """ram: bytes; dram, disk: bytes a second that the processor can read; latency: seconds until a read begins."""

    name: str
    ram: float
    dram: float
    disk: float
    latency: float = 100e-6
    source: str = ""


SYSTEM = 1e9  # bytes that a board's own system takes
RK3588 = "RK1 benchmarks of Turing Machines: processors read 17 to 22 GB/s (LPDDR4X); disk: NVMe, assumed"
ORIN = "data sheets of NVIDIA: {} (peak, shared with the GPU: processors may reach less); disk: NVMe, assumed"


def _boards() -> Iterator[Machine]:
    for gigabytes in (8, 16, 32):
        yield Machine(f"rk3588-{gigabytes}gb", gigabytes * 1e9 - SYSTEM, 20e9, 2.5e9, source=RK3588)
    orins = (
        ("orin-nano-8gb", 8, 68.0, "Jetson Orin Nano Series"),
        ("orin-nx-16gb", 16, 102.4, "Jetson Orin NX Series, DS-10712-001"),
        ("agx-orin-32gb", 32, 204.8, "Jetson AGX Orin Series"),
        ("agx-orin-64gb", 64, 204.8, "Jetson AGX Orin Series"),
    )
    for name, gigabytes, dram, sheet in orins:
        yield Machine(name, gigabytes * 1e9 - SYSTEM, dram * 1e9, 3e9, source=ORIN.format(sheet))


BOARDS = {board.name: board for board in _boards()}
