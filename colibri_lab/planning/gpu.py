"""A card beside the machine: experts in three tiers, and what a token costs then. No card has measured any of it.

As docs/gpu_memory.md says: resident weights, keys and values lie on the card, what it has left holds experts; host
memory holds others, and one that is on the card needs no place there. With `expert_placement: gpu` an expert that is
missing on the card is sent there, and read from the disk before that where the host lacks it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..sizes import parse_size
from .boards import CARDS, Card, Machine
from .cost import PROCESS, TOKEN_S, Forecast, Needs, asking, reading

REACH = 0.7  # part of a copy's rate on the card that kernels read at: the target of docs/gpu.md
LAUNCHES = 21  # kernels of a layer at one row, and of a token beside its layers: counted on the simulator
TOKEN_LAUNCHES = 5
LAUNCH_S = 6e-6  # of the host's time for a launch, assumed; kernels run beside the launches of the next ones
GAP_S = 1.5e-6  # between two kernels of a graph, assumed
SEND_S = 20e-6  # until a layer's first transfer begins and is waited for, assumed
CONTEXT = 0.5e9  # bytes that the driver keeps of a card, assumed


def card_of(given: str) -> Card:
    """A known card's name, or its memory, rate and link, as "24GB,900GB/s,link=25GB/s". ConfigError."""
    if given in CARDS:
        return CARDS[given]
    parts = [part.strip() for part in given.split(",")]
    if len(parts) == 3 and parts[2].startswith("link="):
        try:
            sizes = [parse_size(part.removeprefix("link=").removesuffix("/s")) for part in parts]
        except ValueError:
            sizes = []
        memory, dram, link = sizes or (0, 0, 0)
        if isinstance(memory, int) and isinstance(dram, int) and isinstance(link, int) and min(memory, dram, link) > 0:
            return Card("this card", memory, dram, link)
    raise ConfigError(f"--gpu {given!r:.60} is none of {', '.join(CARDS)}, nor like 24GB,900GB/s,link=25GB/s")


@dataclass(frozen=True)
class Tiers:
    """Parts of the experts, 0 to 1, together 1: on the card, in host memory, on the disk alone."""

    device: float
    host: float

    @property
    def disk(self) -> float:
        return max(0.0, 1 - self.device - self.host)


def tiers(need: Needs, machine: Machine, card: Card) -> Tiers:
    """Where the experts are. ConfigError where card or host does not hold what has to be there."""
    total = need.experts * need.expert
    room = card.memory - CONTEXT - need.dense - need.kv
    _hold(card.name, room, need.least * need.expert, need)
    device = min(1.0, room / total)
    spare = machine.ram - need.dense - PROCESS  # the host keeps the resident weights that it sent
    _hold(machine.name, spare, need.least * need.expert, need)
    return Tiers(device, min(1.0 - device, spare / total))


def _hold(name: str, room: float, least: float, need: Needs) -> None:
    if room < least:
        raise ConfigError(
            f"{name}: {(least - room) / 1e9:.2f} GB of memory are missing: resident weights take "
            f"{need.dense / 1e9:.2f} GB, keys and values {need.kv / 1e9:.2f} GB on the card; "
            f"choose fewer bits (--quantize), a shorter --context, or more memory"
        )


def on_card(need: Needs, machine: Machine, card: Card, where: Tiers, device_hits: float, hits: float) -> Forecast:
    """One sequence that decodes, `expert_placement: gpu`. With all experts on the card a step is one CUDA graph.

    device_hits: part of the experts asked for that is on the card; hits: on the card or in host memory; 0 to 1.
    """
    rate, graph = card.dram * REACH, where.device == 1
    sent = need.uses * (1 - device_hits)
    launches = need.layers * LAUNCHES + TOKEN_LAUNCHES
    seconds = {
        "dense": need.dense_read / rate,
        "experts": need.uses * need.expert / rate,
        "kv": need.kv_read / rate,
        "calls": launches * (GAP_S if graph else LAUNCH_S) + TOKEN_S,
        "link": sent * need.expert / card.link + asking(need, device_hits) * SEND_S,
        "disk": reading(need, machine, hits),
    }
    return Forecast(where.device + where.host, hits, seconds, ahead=not graph)
