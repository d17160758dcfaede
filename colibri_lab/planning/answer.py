"""What `colibri-lab plan` says: does a model fit, how fast would it be, and what bounds it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ..analysis.accesses import Accesses, recorded
from ..errors import ConfigError
from ..model.families import read_spec
from ..model.jsonfile import read_object
from ..model.plan import Plan, make_plan
from ..sizes import parse_size
from .boards import BOARDS, Card, Machine
from .cost import KV_ITEM, Forecast, Needs, forecast, needs, share_in_memory
from .gpu import Tiers, card_of, on_card, tiers
from .misses import ASSUMED, assumed, hit_rate


def answer(model_config: Path, *, board: str | None, ram: str | None, dram: str | None, disk: str | None,
           gpu: str | None, quantize: str, group_size: int, context: int | None, kv_dtype: str, trace: Path | None,
           as_json: bool) -> str:  # fmt: skip
    """What the command prints; see its options. ConfigError and ModelError for wrong input."""
    if kv_dtype not in KV_ITEM:
        raise ConfigError(f"--kv-dtype {kv_dtype!r} is none of {', '.join(KV_ITEM)}")
    machine, card = _machine(board, ram, dram, disk), None if gpu is None else card_of(gpu)
    layout = make_plan(read_spec(read_object(model_config), str(model_config)), quantize, group_size, "--quantize")
    need = needs(layout, min(4096, layout.spec.max_positions) if context is None else context, kv_dtype)
    here = _with_card(need, machine, card, layout, trace) if card else _alone(need, machine, layout, trace)
    if as_json:
        return json.dumps(_form(machine, need, here), allow_nan=False)
    return "\n".join(_lines(machine, layout, need, here, trace))


@dataclass(frozen=True)
class Here:
    """A forecast, and of a card where its experts are and how many of those asked for it has."""

    found: Forecast
    card: Card | None = None
    where: Tiers | None = None
    device_hits: float = 0.0


def _alone(need: Needs, machine: Machine, layout: Plan, trace: Path | None) -> Here:
    share = share_in_memory(need, machine)
    return Here(forecast(need, machine, share, hit_rate(_accesses(trace, layout), share)))


def _with_card(need: Needs, machine: Machine, card: Card, layout: Plan, trace: Path | None) -> Here:
    where, accesses = tiers(need, machine, card), _accesses(trace, layout)
    there = hit_rate(accesses, where.device, "lru")  # who was used longest ago leaves the card
    hits = max(there, hit_rate(accesses, min(1.0, where.device + where.host)))
    return Here(on_card(need, machine, card, where, there, hits), card, where, there)


def _machine(board: str | None, ram: str | None, dram: str | None, disk: str | None) -> Machine:
    given = {"ram": _size("ram", ram), "dram": _size("dram", dram), "disk": _size("disk", disk)}
    chosen = {name: value for name, value in given.items() if value is not None}
    if board is None:
        if missing := [f"--{name}" for name in given if name not in chosen]:
            raise ConfigError(f"plan: {', '.join(missing)} missing; or name a board with --board: {', '.join(BOARDS)}")
        return Machine("this machine", chosen["ram"], chosen["dram"], chosen["disk"])
    if board not in BOARDS:
        raise ConfigError(f"--board {board!r:.40} is none of {', '.join(BOARDS)}")
    known = BOARDS[board]
    ram_, dram_, disk_ = (chosen.get(name, getattr(known, name)) for name in given)
    return replace(known, ram=ram_, dram=dram_, disk=disk_)


def _size(name: str, given: str | None) -> float | None:
    """Bytes, or bytes a second, of "32GB" or "3GB/s"."""
    if given is None:
        return None
    try:
        size = parse_size(given.strip().removesuffix("/s"))
    except ValueError:
        size = 0
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"--{name} {given!r:.40}: a size is like 32GB, a rate like 3GB/s")
    return float(size)


def _accesses(trace: Path | None, layout: Plan) -> Accesses:
    spec = layout.spec
    if trace is None:
        return assumed(len(spec.sparse_layers), spec.experts, spec.top_k)
    from ..telemetry import replay

    try:
        found = recorded(replay(trace))
    except ValueError as error:
        raise ConfigError(f"{trace}: {error}") from None
    if (found.experts, found.top_k) != (spec.experts, spec.top_k):
        raise ConfigError(
            f"{trace}: was recorded from a model of {found.experts} experts, top-{found.top_k}; "
            f"the config has {spec.experts}, top-{spec.top_k}"
        )
    return found


def _form(machine: Machine, need: Needs, here: Here) -> dict[str, object]:
    found, card, where = here.found, here.card, here.where
    form: dict[str, object] = {
        "machine": {"name": machine.name, "ram": machine.ram, "dram": machine.dram, "disk": machine.disk},
        "bytes": {"dense": need.dense, "kv": need.kv, "experts": need.experts * need.expert},
        "experts_in_memory": found.share,
        "hit_rate": found.hits,
        "seconds": found.seconds,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_overlapped": found.overlapped,
        "bound": found.bound,
    }
    if card and where:
        form["gpu"] = {"name": card.name, "memory": card.memory, "dram": card.dram, "link": card.link}
        form["experts"] = {"device": where.device, "host": where.host, "disk": where.disk}
        form["hit_rate_device"] = here.device_hits
    return form


def _lines(machine: Machine, layout: Plan, need: Needs, here: Here, trace: Path | None) -> list[str]:
    spec, found = layout.spec, here.found
    traffic = f"recorded in {trace}" if trace else f"assumed: {ASSUMED}; --trace takes a recorded run"
    if found.share == 1:
        traffic = "all are in memory"
    spent = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in found.seconds.items())
    lines = [
        f"model    {spec.family}, {spec.layers} layers, {spec.experts} experts, top-{spec.top_k}, {layout.quantize}",
        f"machine  {machine.name}: {_bytes(machine.ram)} for the engine, memory {machine.dram / 1e9:.3g} GB/s, "
        f"disk {machine.disk / 1e9:.3g} GB/s",
        *_memory(need, here),
        f"hits     {found.hits:.1%} of the experts asked for ({traffic})",
        f"a token  ms: {spent}",
        f"speed    {found.tokens_per_s:.3g} tokens/s, bound by {found.bound}; at most {found.overlapped:.3g} with "
        f"reading hidden (engine_mode async)",
    ]
    sources = (machine.source, here.card.source if here.card else "")
    return [*lines, *(f"source   {source}" for source in sources if source)]


def _memory(need: Needs, here: Here) -> list[str]:
    """Who holds what."""
    total, card, where = need.experts * need.expert, here.card, here.where
    held = f"resident weights {_bytes(need.dense)}, keys and values {_bytes(need.kv)}"
    if not (card and where):
        share = here.found.share
        return [f"memory   {held}, experts {_bytes(share * total)} of {_bytes(total)} ({share:.0%})"]
    places = (("the card", where.device), ("the host", where.host), ("the disk alone", where.disk))
    experts = ", ".join(f"{name} {_bytes(share * total)} ({share:.0%})" for name, share in places)
    return [
        f"card     {card.name}: {_bytes(card.memory)}, memory {card.dram / 1e9:.4g} GB/s, link "
        f"{card.link / 1e9:.3g} GB/s; never measured: launches and the share that kernels reach are assumed",
        f"memory   on the card: {held}",
        f"experts  {_bytes(total)}: {experts}; {here.device_hits:.1%} of those asked for are on the card",
    ]


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
