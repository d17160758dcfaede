"""What is pointed at, exactly: an expert or a KV slot, in more figures than a frame carries for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_lab.view.run import RunView


def detail(view: RunView, asked: Mapping[str, Any]) -> dict[str, Any]:
    """asked: {"kind": "expert", "layer", "expert"} or {"kind": "slot", "slot"}; the answer says it again.

    Empty where there is no such thing.
    """
    kind, at = asked.get("kind"), [asked.get(name) for name in ("layer", "expert", "slot")]
    layer, expert, slot = (v if isinstance(v, int) and v >= 0 else 1 << 62 for v in at)
    if kind == "expert" and layer < view.layers and expert < view.n_experts:
        return {"kind": kind, "layer": layer, "expert": expert} | _expert(view, layer, expert)
    if kind == "slot" and slot < len(view.slots.sequence):
        return {"kind": kind, "slot": slot} | _slot(view, slot)
    return {}


def _expert(view: RunView, layer: int, expert: int) -> dict[str, Any]:
    known, last = view.experts, int(view.experts.last_fault_ns[layer, expert])
    return {
        "share": round(float(known.share[layer, expert]), 4),
        "faults": int(known.faults[layer, expert]),
        "since": round((view.timeline.last_ns - last) / 1e9, 1) if last and view.timeline.last_ns > last else None,
    }


def _slot(view: RunView, slot: int) -> dict[str, Any]:
    pool = view.slots
    if pool.free[slot]:
        return {"free": True}
    owner = int(pool.owner[slot])
    told = {"sequence": int(pool.sequence[slot]), "layer": int(pool.layer[slot])}
    return told | {"owner": None if owner < 0 else owner, "tokens": int(pool.fill[slot]), "size": pool.slot_size}
