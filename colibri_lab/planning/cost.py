"""What one decoded token costs: bytes over the rates at which they come, and a call's own time.

The engine reads a token's weights from memory once, and what is missing of its experts from disk first (sync) or
meanwhile (async). Constants are this engine's, measured (`colibri-lab bench plan` compares); rates are the machine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..model.plan import Plan
from .boards import Machine

REACH = 0.85  # part of the memory's rate that the kernels reach on weights: 0.83 to 0.93 in `colibri-lab bench kernels`
KV_REACH = 0.67  # and attention on keys and values: 0.65 to 0.72 in `colibri-lab bench kv`
LAYER_S = 20e-6  # of a layer beside its bytes: what the engine writes down of it
TOKEN_S = 60e-6  # of a token beside its layers: sampling, telemetry, the request
READ_S = 120e-6  # of a missing expert beside its read: who leaves, the books of pages, layers no longer at one go
PROCESS = 60e6  # bytes of Python and its libraries: `colibri-lab bench footprint`
KV_ITEM = {"fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Needs:
    """Bytes of a model in a quantisation at a context length."""

    dense: int  # resident weights
    dense_read: int  # of these, what a token reads: all but the embedding
    expert: int  # one routed expert
    experts: int  # how many there are in all layers
    uses: int  # how many of them a token takes
    layers: int
    sparse: int  # layers with experts
    least: int  # experts that must be in memory together
    kv: int  # keys and values of the context
    kv_read: int  # of these, what a token's query reads


def needs(plan: Plan, context: int, kv_dtype: str = "fp16") -> Needs:
    """ConfigError for a context that the model does not have."""
    spec = plan.spec
    if not 1 <= context <= spec.max_positions:
        raise ConfigError(f"--context {context}: the model has 1 to {spec.max_positions} positions")
    row = 2 * spec.kv_rows * KV_ITEM[kv_dtype]
    dense = sum(piece.nbytes for piece in plan.residents)
    aside = sum(piece.nbytes for piece in plan.residents if piece.name == "embedding")
    sparse = len(spec.sparse_layers)
    seen = sum(min(context, window) if window else context for window in spec.window)
    return Needs(
        dense=dense, dense_read=dense - aside, expert=plan.expert_bytes, experts=sparse * spec.experts,
        uses=sparse * spec.top_k, layers=spec.layers, sparse=sparse, least=spec.top_k,
        kv=spec.layers * context * row, kv_read=seen * row,
    )  # fmt: skip


def share_in_memory(need: Needs, machine: Machine) -> float:
    """The part of the experts that the machine's memory holds, 0 to 1. ConfigError where not even a token's fit."""
    room = machine.ram - need.dense - need.kv - PROCESS
    if room < need.least * need.expert:
        missing = need.least * need.expert - room
        raise ConfigError(
            f"{machine.name}: {missing / 1e9:.2f} GB of memory are missing: resident weights take "
            f"{need.dense / 1e9:.2f} GB, keys and values {need.kv / 1e9:.2f} GB; "
            f"choose fewer bits (--quantize), a shorter --context, or more memory"
        )
    return min(1.0, room / (need.experts * need.expert))


MEMORY = ("dense", "experts", "kv")
BOUNDS = {"disk": ("disk",), "link": ("link",), "memory": MEMORY, "calls": ("calls",)}


@dataclass(frozen=True)
class Forecast:
    """Seconds of a token by where they go, at `share` of the experts in memory and a hit rate of `hits`."""

    share: float
    hits: float
    seconds: dict[str, float]
    ahead: bool = False  # calls only begin what runs beside them: a card's launches

    @property
    def lanes(self) -> dict[str, float]:
        """Seconds by what bounds them: disk, link (to a card), memory, calls."""
        return {name: sum(self.seconds.get(part, 0.0) for part in parts) for name, parts in BOUNDS.items()}

    @property
    def tokens_per_s(self) -> float:
        """engine_mode sync: one thing after the other."""
        lanes = self.lanes
        return 1 / (lanes["disk"] + lanes["link"] + self._computing(lanes))

    @property
    def overlapped(self) -> float:
        """Tokens a second that no engine_mode can exceed: reading and sending hidden behind the rest, or it."""
        lanes = self.lanes
        return 1 / max(lanes["disk"], lanes["link"], self._computing(lanes))

    @property
    def bound(self) -> str:
        """What a token spends most of its time on."""
        lanes = self.lanes
        return max(lanes, key=lambda name: lanes[name])

    def _computing(self, lanes: dict[str, float]) -> float:
        memory, calls = lanes["memory"], lanes["calls"]
        return max(memory, calls) if self.ahead else memory + calls


def forecast(need: Needs, machine: Machine, share: float, hits: float) -> Forecast:
    """One sequence that decodes. hits: part of the experts asked for that is in memory, 0 to 1."""
    seconds = {
        "dense": need.dense_read / machine.dram / REACH,
        "experts": need.uses * need.expert / machine.dram / REACH,
        "kv": need.kv_read / machine.dram / KV_REACH,
        "calls": need.layers * LAYER_S + TOKEN_S,
        "disk": reading(need, machine, hits),
    }
    return Forecast(share, hits, seconds)


def reading(need: Needs, machine: Machine, hits: float) -> float:
    """Seconds that a token waits for the disk, at a hit rate of 0 to 1."""
    reads = need.uses * (1 - hits)
    return reads * (need.expert / machine.disk + READ_S) + asking(need, hits) * machine.latency


def asking(need: Needs, hits: float) -> float:
    """Layers of a token that lack at least one of their experts."""
    return need.sparse * (1 - float(hits ** (need.uses / need.sparse)))
