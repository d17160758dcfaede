"""One picture of a run as one block of bytes, for the canvas.

    bytes 0..3   "CLB1"
    bytes 4..7   u32, little-endian: length H of the header, a multiple of 4
    4+4..8+H     the header: JSON in UTF-8, padded with blanks; its "arrays" lists [name, dtype, shape] in order
    8+H..        the arrays, little-endian, C order, each beginning at a multiple of 4

Arrays of a board frame (L layers, E experts, N columns, S slots up to the last one used, T new pieces of text):
    cell   u1 [L, E]    bits 0-5 share of the window's rows over header.peak, in 1/63; bit 6 in memory; bit 7 just read
    mark   u1 [L, E]    bit 0 pinned, bit 1 in memory since it was read ahead; empty when there are none
    stage  u2 [N, 5]    in header.unit_us microseconds: experts, attention, I/O wait, head, other
    count  u1|u2 [N, 3] faults, hits, evictions
    flag   u1 [N]       bit 0 prefill, bit 1 rows were missed before it, bit 2 of the sequence whose text is shown
    place  u2|u4 [N]    position of the row in its sequence
    slot   u2|u4 [S]    bits 0-2 valid tokens in 1/7 of the slot, 0 only where empty; bits 3-4 kind: 0 an expert's own,
                        1 of two taken at once, 2 shared base slot, 3 free (bit 0: used before); from bit 5 on
                        layer * E + expert, or layer * len(header.owners) + i, the i-th of these sequences
    bins   u2 [48]      tokens of each latency bin from 0 to header.ms_end
    sys    u1 [R, M]    lines of the systems (systems.SYSTEMS), those that header.rows names: see strips.packed
    age    u2 [M]       tenths of a second from the end of each column of sys to that of the last
    when   u1 [N]       the column of sys that each token fell into, 255 where there is none yet
    route  u1|u2 [T, L, k']  experts of each new piece; the highest value where unknown; k' is 1 where L * k > 64
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from colibri_lab.events import NO_EXPERT, Phase
from colibri_lab.view import strips
from colibri_lab.view.prose import Pieces
from colibri_lab.view.run import RunView
from colibri_lab.view.systems import SYSTEMS

MAGIC, COLUMNS, PIECES, RECENT_STEPS = b"CLB1", 120, 96, 2
DOUBLE_SLOT, BASE_SLOT, FREE_SLOT = 1, 2, 3
Arrays = dict[str, np.ndarray]


def pack(header: dict[str, Any], arrays: Arrays) -> bytes:
    """The block; ValueError for a dtype that a browser has no typed array for."""
    for name, array in arrays.items():
        if array.dtype.str[1:] not in ("u1", "u2", "u4", "f4"):
            raise ValueError(f"{name}: {array.dtype} cannot go into a frame")
    listed = [[name, array.dtype.str[1:], list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    head = text.encode()
    head += b" " * (-len(head) % 4)
    parts = [MAGIC, len(head).to_bytes(4, "little"), head]
    for array in arrays.values():
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        parts += [data, b"\0" * (-len(data) % 4)]
    return b"".join(parts)


def unpack(block: bytes) -> tuple[dict[str, Any], Arrays]:
    """The inverse of pack."""
    if block[:4] != MAGIC:
        raise ValueError("not a board frame")
    at = 8 + int.from_bytes(block[4:8], "little")
    header, arrays = json.loads(block[8:at]), {}
    for name, dtype, shape in header.pop("arrays"):
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(block, "<" + dtype, count, at).reshape(shape)
        size = arrays[name].nbytes
        at += size + -size % 4
    return header, arrays


def smallest(values: np.ndarray, least: str = "u1") -> np.ndarray:
    """The same whole numbers in the narrowest unsigned dtype that holds them."""
    top = int(values.max(initial=0))
    return values.astype(max(least, "u1" if top < 1 << 8 else "u2" if top < 1 << 16 else "u4"))


def cells(view: RunView) -> tuple[np.ndarray, float]:
    """(cell, peak): see the module's text; peak is the share that 63 stands for."""
    experts, share = view.experts, view.experts.share
    peak = float(share.max(initial=0.0)) or 1.0
    out = np.rint(share * (63 / peak)).astype("u1")
    columns = view.timeline.columns
    out |= experts.resident.astype("u1") << 6
    if len(columns) > RECENT_STEPS:
        since = columns["t_ns"][-1 - RECENT_STEPS]
        out |= (experts.last_fault_ns > since).astype("u1") << 7
    return out, peak


def marks(view: RunView) -> np.ndarray:
    """See the module's text."""
    experts = view.experts
    out: np.ndarray = experts.pinned.astype("u1") | (experts.ahead & experts.resident).astype("u1") << 1
    return out if out.any() else out[:0]


def strip(view: RunView, columns: int = COLUMNS) -> tuple[Arrays, float]:
    """(stage, count, flag, place of the newest columns; unit_us)."""
    rows = view.timeline.columns[-columns:]
    top = int(rows["stages_ns"].max(initial=0))
    unit = max(1.0, top / 1000 / 65535)
    mine = rows["sequence"] == max(view.prose.sequence, 0)
    flag = (rows["phase"] == Phase.PREFILL) | (rows["gap"] > 0).astype("u1") << 1 | mine.astype("u1") << 2
    counts = np.stack([rows["faults"], rows["hits"], rows["evictions"]], axis=1)
    arrays = {"stage": np.rint(rows["stages_ns"] / (1000 * unit)).astype("u2"), "count": smallest(counts)}
    return arrays | {"flag": flag.astype("u1"), "place": smallest(rows["position"], "u2")}, unit


def slots(view: RunView) -> tuple[list[int], np.ndarray]:
    """(sequences that own slots where these are coloured by sequence, else none; slot: see the module's text)."""
    pool = view.slots
    used = pool.sequence >= 0  # now or before
    last = int(np.flatnonzero(used)[-1]) + 1 if used.any() else 0
    used, free, owner, layer = used[:last], pool.free[:last], pool.owner[:last], pool.layer[:last]
    owners = np.unique(pool.sequence[:last][~free]) if view.hue == "sequence" else np.zeros(0, "i8")
    if view.hue == "sequence":
        who = np.minimum(np.searchsorted(owners, pool.sequence[:last]), max(len(owners) - 1, 0))
        number = layer * max(len(owners), 1) + who
    else:
        number = layer * view.n_experts + np.maximum(owner, 0)
    size = pool.slot_size or max(1, int(pool.fill.max(initial=0)))
    fill = np.minimum(-(-pool.fill[:last] * 7 // size), 7)
    kind = np.where(owner < 0, BASE_SLOT, np.where(pool.double[:last], DOUBLE_SLOT, 0))
    packed = np.where(free, FREE_SLOT << 3 | used, number << 5 | kind << 3 | fill)
    return owners.tolist(), smallest(packed, "u2")


def systems(view: RunView) -> tuple[dict[str, Any], Arrays]:
    """(header fields, arrays) of the systems' panels."""
    window = strips.Window(view.gauges)
    header, lines = strips.packed(window)
    header["marks"] = [strips.marks(view.notes, window, system.notes) for system in SYSTEMS]
    header["warnings"] = view.warnings
    ends = window.ends_ns
    age = np.minimum((ends[-1:] - ends) // 10**8, 65535)
    when = np.searchsorted(ends, view.timeline.columns["t_ns"][-COLUMNS:])
    when[when == len(ends)] = strips.NONE
    return header, {"sys": lines, "age": age.astype("u2"), "when": when.astype("u1")}


def routes(view: RunView, pieces: Pieces) -> np.ndarray:
    route = pieces.route if view.layers * view.top_k <= 64 else pieces.route[:, :, :1]
    narrow = "u1" if view.n_experts < 255 else "u2"
    return np.where(route == NO_EXPERT, np.iinfo(narrow).max, route).astype(narrow)


def spilled(view: RunView) -> int | None:
    """Slots whose tokens lie in a file now; None where nothing spills."""
    value = view.gauges.last("persistence.slots_spilled")
    return None if value is None else int(value)


def figures(view: RunView) -> dict[str, Any]:
    """What the tiles say, as plain numbers; None where it is not known."""
    time, experts = view.timeline, view.experts
    latency = time.latency()
    first, recent, whole = time.first_token_ms(), time.hit_rate(64), time.hit_rate()
    return {
        "decoded": time.decoded,
        "prompt": time.prompt_tokens,
        "rate": round(time.tokens_per_s(), 2),
        "ms": [round(v, 3) for v in latency[1:]],
        "ttft": None if first is None else round(first, 2),
        "prompt_rate": round(time.prompt_rows / (time.prompt_ns / 1e9), 1) if time.prompt_ns else None,
        "hits": None if recent is None else round(recent, 4),
        "hits_all": None if whole is None else round(whole, 4),
        "faults": time.faults,
        "read": time.bytes_read,
        "resident": int(experts.resident.sum()),
        "resident_bytes": view.resident_bytes,
        "budget": view.budget_bytes,
        "total": view.about.get("experts_total_bytes"),
        "kv": [view.slots.used, len(view.slots.sequence), view.slots.peak, view.slots.slot_size, spilled(view)],
        "window": experts.window,
        "missed": view.missing,
        "sequences": time.started,
    }


def board_frame(view: RunView, state: dict[str, Any], after: int) -> tuple[bytes, int]:
    """(block, position of the newest piece of text in it). `after`: the last piece that was sent already."""
    pieces = view.prose.after(after, PIECES)
    cell, peak = cells(view)
    columns, unit = strip(view)
    bins, end = view.timeline.histogram()
    owners, slot = slots(view)
    header = {
        **state,
        **figures(view),
        "L": view.layers,
        "E": view.n_experts,
        "k": view.top_k,
        "peak": round(peak, 4),
        "owners": owners,
        "unit_us": unit,
        "ms_end": end,
        "gaps": [int(n) for n in view.timeline.columns["gap"][-COLUMNS:] if n],
        "text": prose_header(view, pieces),
    }
    arrays = {"cell": cell, "mark": marks(view), **columns, "slot": slot, "bins": np.minimum(bins, 65535).astype("u2")}
    told, lines = systems(view)
    header |= told
    arrays |= lines | {"route": routes(view, pieces)}
    return pack(header, arrays), pieces.position[-1] if pieces.position else after


def prose_header(view: RunView, pieces: Pieces) -> dict[str, Any]:
    before = view.prose.before(pieces.position[0]) if pieces.position else None
    return {
        "epoch": view.epoch,
        "sequence": view.prose.sequence,
        "end": view.prose.last,
        "before": before,
        "at": pieces.position,
        "piece": pieces.text,
    }


def prose_block(view: RunView) -> bytes:
    """All the text that is kept, in the same form: header.text and route only."""
    pieces = view.prose.after(-1)
    text = prose_header(view, pieces) | {"prompt": view.prompt}
    header = {"L": view.layers, "E": view.n_experts, "k": view.top_k, "text": text}
    return pack(header, {"route": routes(view, pieces)})
