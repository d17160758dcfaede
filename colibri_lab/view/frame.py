"""One picture of a run as blocks of bytes, for the canvas.

    bytes 0..3   "CLB1"
    bytes 4..7   u32, little-endian: length H of the header, a multiple of 4
    4+4..8+H     the header: JSON in UTF-8, padded with blanks; its "arrays" lists [name, dtype, shape] in order
    8+H..        the arrays, little-endian, C order, each beginning at a multiple of 4

The frame has what moves with every token; what moves less are blocks of their own (blocks.py), which take turns.
Arrays of a frame (L layers, E experts, N columns, T new pieces of text; cell and mark: see blocks.py):
    stage  u2 [N, 7]    in header.unit_us microseconds: timeline.STAGES
    count  u1|u2 [N, 5] faults, hits, evictions, hits of guesses, guesses wasted
    flag   u1 [N]       bit 0 prefill, bit 1 rows were missed before it, bit 2 of the sequence whose text is shown
    place  u2|u4 [N]    position of the row in its sequence
    bin    u1 [N]       the latency bin of the row, 255 for prompts
    bins   u2 [48]      tokens of each latency bin from 0 to header.ms_end
    route  u1|u2 [T, L, k']  experts of each new piece; the highest value where unknown; k' is 1 where L * k > 64
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from colibri_lab.events import Phase
from colibri_lab.view.blocks import BLOCKS, COLUMNS, Arrays, experts, large, smallest
from colibri_lab.view.prose import Pieces
from colibri_lab.view.run import RunView
from colibri_lab.view.timeline import COUNTED

_TYPES = {np.dtype("<" + name): name for name in ("u1", "u2", "u4", "f4")}
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
MAGIC, PIECES, BINS, NONE = b"CLB1", 96, 48, 255
PREFILL = int(Phase.PREFILL)  # NumPy compares with plain integers ten times faster


def pack(header: dict[str, Any], arrays: Arrays) -> bytes:
    """The block; ValueError for a dtype that a browser has no typed array for."""
    kinds = {name: _TYPES.get(array.dtype) for name, array in arrays.items()}
    for name, kind in kinds.items():
        if kind is None:
            raise ValueError(f"{name}: {arrays[name].dtype} cannot go into a frame")
    listed = [[name, kinds[name], array.shape] for name, array in arrays.items()]
    head = _json({**header, "arrays": listed}).encode()
    head += b" " * (-len(head) % 4)
    parts = [MAGIC, len(head).to_bytes(4, "little"), head]
    for array in arrays.values():
        parts.append(array.tobytes())
        if rest := -array.nbytes % 4:
            parts.append(b"\0" * rest)
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


def strip(view: RunView, end_ms: float, columns: int = COLUMNS) -> tuple[Arrays, float]:
    """(stage, count, flag, place, bin of the newest columns; unit_us). end_ms: of the latency bins."""
    rows = view.timeline.columns[-columns:]
    stages = rows["stages_ns"]
    top = int(stages.max(initial=0))
    unit = max(1.0, top / 1000 / 65535)
    mine = rows["sequence"] == max(view.prose.sequence, 0)
    prefill = rows["phase"] == PREFILL
    flag = prefill | (rows["gap"] > 0).view("u1") << 1 | mine.view("u1") << 2
    at = np.minimum(rows["latency_ns"] * (BINS / 1e6 / end_ms), BINS - 1).astype("u1")
    at[prefill] = NONE
    share = stages / (1000 * unit)
    arrays = {"stage": np.rint(share, out=share).astype("u2"), "count": smallest(rows.view(COUNTED)["count"])}
    return arrays | {"flag": flag, "place": smallest(rows["position"], "u2"), "bin": at}, unit


def routes(view: RunView, pieces: Pieces) -> np.ndarray:
    route = pieces.route if view.layers * view.top_k <= 64 else pieces.route[:, :, :1]
    return route.astype("u1" if view.n_experts < 255 else "u2")  # NO_EXPERT becomes the highest value of either


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
        "resident": int(np.count_nonzero(experts.resident)),
        "resident_bytes": view.resident_bytes,
        "budget": view.budget_bytes,
        "total": view.about.get("experts_total_bytes"),
        "pages": view.pages,
        "kv": [view.slots.used, len(view.slots.sequence), view.slots.peak, view.slots.slot_size, spilled(view)],
        "window": experts.window,
        "missed": view.missing,
        "sequences": time.started,
    }


def board_frame(view: RunView, state: dict[str, Any], after: int) -> tuple[bytes, int]:
    """(block, position of the newest piece of text in it). `after`: the last piece that was sent already."""
    pieces = view.prose.after(after, PIECES)
    bins, end = view.timeline.histogram(BINS)
    columns, unit = strip(view, end)
    told, arrays = ({}, {}) if large(view) else experts(view)
    header = {
        **state,
        **figures(view),
        **told,
        "L": view.layers,
        "E": view.n_experts,
        "k": view.top_k,
        "unit_us": unit,
        "ms_end": end,
        "shown": view.timeline.shown,
        "gaps": [n for n in view.timeline.columns["gap"][-COLUMNS:].tolist() if n],
        "text": prose_header(view, pieces),
    }
    arrays |= columns | {"bins": np.minimum(bins, 65535).astype("u2"), "route": routes(view, pieces)}
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


def block(view: RunView, name: str) -> bytes:
    """One of blocks.names(view)."""
    return pack(*BLOCKS[name](view))
