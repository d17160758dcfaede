"""The parts of a picture that move less than tokens: blocks of bytes beside the frame, sent in turns.

Arrays (L layers, E experts, S slots up to the last one used; see frame.py for the form):
    cell   u1 [L, E]    bits 0-5 share of the window's rows over header.peak, in 1/63; bit 6 in memory; bit 7 just read
    mark   u1 [2|3, B]  a bit for each expert, layer by layer, lowest bit first: pinned, and in memory since it was read
                        ahead; a third row where some are on the GPU; empty when there are none
    fault  u2|u4 [L]    faults of each layer so far
    slot   u2|u4 [S]    bits 0-2 valid tokens in 1/7 of the slot, 0 only where empty; bits 3-4 kind: 0 an expert's own,
                        1 of two taken at once, 2 shared base slot, 3 free (bit 0: used before); from bit 5 on
                        layer * E + expert, or layer * len(header.owners) + i, the i-th of these sequences
    sys    u1 [R, M]    lines of the systems (systems.SYSTEMS), those that header.rows names: see strips.packed
    age    u2 [M]       tenths of a second from the end of each column of sys to that of the last
    when   u1 [N]       the column of sys that each of the newest tokens fell into, 255 where there is none yet; the
                        last of them is column header.until of all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from colibri_lab.view import strips
from colibri_lab.view.run import RunView
from colibri_lab.view.systems import SYSTEMS

RECENT_STEPS, COLUMNS, LARGE = 2, 120, 4096
DOUBLE_SLOT, BASE_SLOT, FREE_SLOT = 1, 2, 3
NOTED = {system.notes for system in SYSTEMS}
Arrays = dict[str, np.ndarray]


def smallest(values: np.ndarray, least: str = "u1") -> np.ndarray:
    """The same whole numbers in the narrowest unsigned dtype that holds them."""
    top = int(values.max(initial=0))
    return values.astype(max(least, "u1" if top < 1 << 8 else "u2" if top < 1 << 16 else "u4"))


def large(view: RunView) -> bool:
    """Whether the experts are so many that they are a block of their own."""
    return view.layers * view.n_experts > LARGE


def names(view: RunView) -> tuple[str, ...]:
    """The blocks beside a frame of this run."""
    return ("pool", "lines", "map") if large(view) else ("pool", "lines")


def turns(view: RunView) -> tuple[tuple[str, ...], ...]:
    """Which of them go with one frame after the other while all moves: what changes slowly goes seldom."""
    return ("pool",), ("map",) if large(view) else (), ("lines",), ()


def cells(view: RunView) -> tuple[np.ndarray, float]:
    """(cell, peak): see the module's text; peak is the share that 63 stands for."""
    experts, share = view.experts, view.experts.share
    peak = float(share.max(initial=0.0)) or 1.0
    share *= 63 / peak
    out = np.rint(share, out=share).astype("u1")
    columns = view.timeline.columns
    out |= experts.resident.view("u1") << 6
    if len(columns) > RECENT_STEPS:
        since = columns["t_ns"][-1 - RECENT_STEPS]
        out |= (experts.last_fault_ns > since).view("u1") << 7
    return out, peak


def experts(view: RunView) -> tuple[dict[str, Any], Arrays]:
    """(header fields, arrays) of the expert map."""
    cell, peak = cells(view)
    known = view.experts
    marks = [known.pinned, known.ahead & known.resident, *([known.device] if known.device.any() else [])]
    some = any(mark.any() for mark in marks)
    told = np.concatenate([mark.ravel() for mark in marks]).reshape(len(marks), -1)[: len(marks) if some else 0]
    mark = np.packbits(told, axis=1, bitorder="little")
    return {"peak": round(peak, 4)}, {"cell": cell, "mark": mark, "fault": smallest(known.faults.sum(axis=1), "u2")}


def slots(view: RunView) -> tuple[list[int], np.ndarray]:
    """(sequences that own slots where these are coloured by sequence, else none; slot: see the module's text)."""
    pool = view.slots
    used = pool.sequence >= 0  # now or before
    last = len(used) - int(used[::-1].argmax()) if used.any() else 0
    used, free, owner, layer = used[:last], pool.free[:last], pool.owner[:last], pool.layer[:last]
    owners = np.unique(pool.sequence[:last][~free])
    if view.hue == "sequence":
        who = np.minimum(np.searchsorted(owners, pool.sequence[:last]), max(len(owners) - 1, 0))
        number = layer * max(len(owners), 1) + who
    else:
        number = layer * view.n_experts + np.maximum(owner, 0)
    size = pool.slot_size or max(1, int(pool.fill.max(initial=0)))
    fill = np.minimum((pool.filled(owners)[:last] * 7 + (size - 1)) // size, 7)
    kind = np.where(owner < 0, BASE_SLOT << 3, pool.double[:last] * (DOUBLE_SLOT << 3))
    packed = np.where(free, FREE_SLOT << 3 | used, number << 5 | kind | fill)
    return owners.tolist() if view.hue == "sequence" else [], smallest(packed, "u2")


def systems(view: RunView) -> tuple[dict[str, Any], Arrays]:
    """(header fields, arrays) of the systems' panels."""
    window = strips.Window(view.gauges)
    header, lines = strips.packed(window)
    notes = [note for note in view.notes if note[0] in NOTED]
    header["marks"] = [strips.marks(notes, window, system.notes) for system in SYSTEMS]
    header["warnings"] = view.warnings
    ends = window.ends_ns
    age = np.minimum((ends[-1:] - ends) // 10**8, 65535)
    when = np.searchsorted(ends, view.timeline.columns["t_ns"][-COLUMNS:])
    when[when == len(ends)] = strips.NONE
    header["until"] = view.timeline.shown
    return header, {"sys": lines, "age": age.astype("u2"), "when": when.astype("u1")}


def pool(view: RunView) -> tuple[dict[str, Any], Arrays]:
    """(header fields, arrays) of the KV slots."""
    owners, slot = slots(view)
    return {"owners": owners}, {"slot": slot}


BLOCKS: dict[str, Callable[[RunView], tuple[dict[str, Any], Arrays]]] = {
    "pool": pool,
    "lines": systems,
    "map": experts,
}
