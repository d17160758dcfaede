"""Machines and cards: what the cost model has to know of one, and those that people ask about."""

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


@dataclass(frozen=True)
class Card:
    """memory: bytes; dram, link: bytes a second that a copy reaches on the card, and between host and card."""

    name: str
    memory: float
    dram: float
    link: float
    source: str = ""


def _known(name: str, gigabytes: float, peak: float, link: float, sheet: str) -> Card:
    """Of a data sheet's GB/s copies reach about nine tenths in the card's memory and eight over PCIe, assumed."""
    source = f"data sheet of NVIDIA's {sheet}: {peak:g} GB/s, PCIe {link:g} GB/s one way; 0.9 and 0.8 of them"
    return Card(name, gigabytes * 1e9, 0.9e9 * peak, 0.8e9 * link, source)


CARDS = {
    card.name: card
    for card in (
        _known("h200", 141, 4800, 64, "H200 SXM"),
        _known("h100", 80, 3350, 64, "H100 SXM"),
        _known("a100-80gb", 80, 2039, 32, "A100 80GB SXM"),
        _known("l40s", 48, 864, 32, "L40S"),
        _known("l4", 24, 300, 32, "L4"),
        _known("rtx-4090", 24, 1008, 32, "GeForce RTX 4090"),
        _known("rtx-3090", 24, 936, 32, "GeForce RTX 3090"),
        _known("rtx-3060-12gb", 12, 360, 32, "GeForce RTX 3060"),
    )
}
