"""The board's panels as SVG text, for pages without a kernel. What depends on the theme is a class of report.css."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np

from colibri_lab.events import Phase
from colibri_lab.view import palette
from colibri_lab.view.blocks import BASE_SLOT, DOUBLE_SLOT, FREE_SLOT, cells, slots
from colibri_lab.view.frame import spilled
from colibri_lab.view.html import duration, number, percent
from colibri_lab.view.run import RunView
from colibri_lab.view.timeline import STAGES

Keys = list[tuple[str, str]]  # (words, colour)
Box = tuple[float, float, float, float]  # left, top, width, height

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")


def panel(title: str, sub: str, body: str, keys: Keys) -> str:
    marks = "".join(f"<span><i style='background:{colour}'></i>{escape(words)}</span>" for words, colour in keys)
    head = f"<div class='head' role='heading' aria-level='3'><b>{escape(title)}</b><span>{escape(sub)}</span></div>"
    return f"<section class='card'>{head}{body}<div class='keys'>{marks}</div></section>"


def image(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{escape(label, True)}'>{''.join(parts)}</svg>"
    )


def boxes(colour: str, places: Iterable[Box], more: str = "") -> str:
    d = "".join(f"M{x:.4g} {y:.4g}h{w:.3g}v{h:.3g}h-{w:.3g}z" for x, y, w, h in places if w > 0 and h > 0)
    style = f"class='{colour}'" if colour in ("fg", "line", "empty") else f"fill='{colour}'"
    return f"<path {style} {more} d='{d}'/>" if d else ""


def text(x: float, y: float, words: object, more: str = "") -> str:
    return f"<text x='{x:.4g}' y='{y:.4g}' {more}>{escape(str(words))}</text>"


def experts_panel(view: RunView, width: float = 1000) -> str:
    cell, peak = cells(view)
    layers, experts = cell.shape
    left, right, high = 54, 62, max(4, min(24, 240 // max(layers, 1)))
    w = (width - left - right) / max(experts, 1)
    gap = 2 if w > 14 and high > 10 else 0.5 if w > 3 else 0
    parts = []
    for level in range(64):
        at = np.argwhere((cell & 63) == level).tolist()
        parts.append(boxes(palette.CIVIDIS[level], [(left + e * w, m * high, w - gap, high - gap) for m, e in at]))
    inside = np.argwhere(cell & 64).tolist()
    if w > 9 and high > 8:
        d = "".join(
            f"M{left + e * w + 1:.4g} {m * high + 1:g}h{w - gap - 2:.3g}v{high - gap - 2:g}h-{w - gap - 2:.3g}z"
            for m, e in inside
        )
        parts.append(f"<path fill='none' stroke='{palette.MEMORY}' stroke-width='2' d='{d}'/>")
    else:
        parts.append(boxes(palette.MEMORY, [(left + e * w, (m + 1) * high - 1, w - gap, 1) for m, e in inside]))
    side, known = min(5.0, w / 3, high / 3), view.experts
    corners = {
        "fg": np.argwhere(known.pinned).tolist(),
        palette.HIT: np.argwhere(known.ahead & known.resident).tolist(),
    }
    for colour, where in corners.items():  # pinned on the right, read ahead on the left
        shift = w - gap - side if colour == "fg" else 0.0
        parts.append(boxes(colour, [(left + e * w + shift, m * high, side, side) for m, e in where]))
    parts += [text(0, m * high + high / 2 + 3, f"layer {m}") for m in range(0, layers, max(1, -(-13 // high)))]
    every = next((n for n in (1, 2, 4, 8, 16, 32) if n * w > 22), 64)
    parts += [
        text(left + e * w + w / 2, layers * high + 13, e, "text-anchor='middle'") for e in range(0, experts, every)
    ]
    faults = known.faults.sum(axis=1).tolist()
    bar, unit = width - right + 8, (right - 8) / max(1, *faults)
    parts.append(boxes(palette.FAULT, [(bar, (m + 0.2) * high, n * unit, high * 0.5) for m, n in enumerate(faults)]))
    parts.append(text(width, layers * high + 13, "faults", "text-anchor='end'"))
    if high >= 12:
        parts += [text(bar + 3, (m + 0.65) * high, f"{n:,}", "class='fg'") for m, n in enumerate(faults) if n]
    total = layers * experts
    label = f"{layers} layers of {experts} experts, {len(inside)} of {total} in memory"
    keys = [
        ("busy", palette.CIVIDIS[63]),
        ("idle", palette.CIVIDIS[4]),
        (f"in memory {len(inside)} (ring)", palette.MEMORY),
    ]
    keys += [(f"on disk {total - len(inside)}", "var(--line)")]
    for words, colour in (("pinned", "fg"), ("read ahead", palette.HIT)):
        if found := len(corners[colour]):
            keys.append((f"{words} {found} (corner)", "var(--fg)" if colour == "fg" else colour))
    sub = f"share of the last {view.experts.window} tokens, brightest {percent(peak)}"
    return panel("Experts", sub, image(width, layers * high + 18, label, parts), keys)


def time_panel(view: RunView, width: float = 1000, columns: int = 240) -> str:
    rows = view.timeline.columns[-columns:]
    left, top, mid, zero, bottom = 58, 6, 130, 180, 206
    stages = rows["stages_ns"] / 1e6
    decode = stages.sum(axis=1)[rows["phase"] == Phase.DECODE]
    most = float(min(decode.max(), 4 * np.median(decode))) * 1.05 if len(decode) else 1.0
    w = (width - left) / columns
    x = left + (columns - len(rows) + np.arange(len(rows))) * w
    base = np.full(len(rows), float(mid))
    parts = [boxes("#99999933", [(a, top, w, bottom - top) for a in x[rows["phase"] == Phase.PREFILL].tolist()])]
    for i, colour in enumerate(palette.STAGES):
        high = np.minimum(stages[:, i] / most * (mid - top), base - top)
        base = base - high
        parts.append(boxes(colour, zip(x.tolist(), base.tolist(), [w - 0.7] * len(x), high.tolist(), strict=True)))
    faults, hits, gone = (rows[name].astype("f8") for name in ("faults", "hits", "evictions"))
    decoded = rows["phase"] == Phase.DECODE
    unit = 42 / max(1.0, float((faults + hits)[decoded].max(initial=0)))
    faults = np.minimum(
        faults, 42 / unit - np.minimum(hits, 42 / unit)
    )  # a prompt step asks for more than a token does
    hits = np.minimum(hits, 42 / unit)
    for colour, start, high in (
        (palette.HIT + "88", zero - hits * unit, hits * unit),
        (palette.FAULT, zero - (hits + faults) * unit, faults * unit),
        (palette.EVICTED, np.full(len(rows), zero + 1.0), np.minimum(gone * unit, bottom - zero)),
    ):
        parts.append(boxes(colour, zip(x.tolist(), start.tolist(), [w - 0.7] * len(x), high.tolist(), strict=True)))
    parts.append(boxes("line", [(left, mid, width - left, 1), (left, zero, width - left, 1)]))
    parts += [
        text(left - 5, y, words, "text-anchor='end'")
        for y, words in ((top + 6, f"{number(most)} ms"), (mid, 0), (zero - 8, "experts"))
    ]
    for a, missed in zip(x.tolist(), rows["gap"].tolist(), strict=True):
        if missed:
            parts += [
                boxes(palette.MARK, [(a - 1, top, 1.5, bottom - top)]),
                text(a + 4, top + 9, f"{missed} missed"),
            ]
    keys = [
        *zip(STAGES, palette.STAGES, strict=True),
        ("expert faults", palette.FAULT),
        ("hits", palette.HIT),
        ("evicted", palette.EVICTED),
    ]
    sums = [int(rows[name].sum()) for name in ("faults", "hits", "evictions")]
    label = f"time of the last {len(rows)} tokens: {sums[0]} expert faults, {sums[1]} hits, {sums[2]} evicted"
    return panel("Time", f"the last {len(rows)} tokens, one column each", image(width, bottom + 4, label, parts), keys)


def slots_panel(view: RunView, width: float = 490) -> str:
    pool, (owners, packed) = view.slots, slots(view)
    total, last, each = max(len(pool.sequence), 1), len(packed), len(owners) or max(view.n_experts, 1)
    n = total if total <= 512 else min(total, max(256, 1 << int(1.3 * last).bit_length()))
    ideal = max(16.0, float(np.sqrt(n * width / 150)))
    across = 1 << round(np.log2(ideal)) if n & (n - 1) == 0 else int(np.ceil(ideal))  # full rows where the pool allows
    side = width / across
    place = [(i % across * side, i // across * side, side - 1, side - 1) for i in range(n)]
    parts, counts, bars, dots = [boxes("empty", place)], dict[int, int](), list[Box](), list[Box]()
    groups: dict[tuple[int, int], list[Box]] = {}
    for i, value in enumerate(packed.tolist()):
        kind, (x, y, w, h) = value >> 3 & 3, place[i]
        if kind == FREE_SLOT:
            groups.setdefault((-2, 0), []).append(place[i]) if value & 1 else None
            continue
        who = -1 if kind == BASE_SLOT and not owners else (value >> 5) % each
        counts[who] = counts.get(who, 0) + 1
        groups.setdefault((who, value & 7), []).append(place[i])
        if kind == DOUBLE_SLOT:
            bars.append((x, y + h * 5 / 6, w, h / 6))
        elif kind == BASE_SLOT:
            dots.append((x + w * 0.38, y + h * 0.38, w * 0.24, h * 0.24))
    for (who, level), same in groups.items():
        colour, alpha = (
            "#999999" if who < 0 else palette.OKABE_ITO[who % 8],
            0.22 if who == -2 else 0.4 + 0.6 * level / 7,
        )
        parts.append(boxes(colour, same, f"fill-opacity='{alpha:.2g}'"))
    parts += [boxes("fg", bars), boxes("fg", dots)]
    top = sorted(counts.items(), key=lambda c: (-c[1], c[0]))[:5]
    names = {who: f"sequence {owners[who]}" if owners else f"expert {who}" for who in counts} | {-1: "shared base"}
    keys = [(f"{names[who]}: {c}", palette.OKABE_ITO[who % 8] if who >= 0 else "#999999") for who, c in top]
    kinds, away = pool.kinds, spilled(view)
    keys += [(f"double {kinds['double']} (bar)", "var(--fg)"), (f"base {kinds['base']} (dot)", "var(--fg)")]
    keys += [(f"free {len(pool.sequence) - pool.used:,}", "var(--empty)")]
    keys += [(f"spilled to a file {away:,}", "transparent")] if away is not None else []
    some, each_holds = (
        f"first {n:,} drawn, " if n < total else "",
        f"{pool.slot_size:,} tokens each, " if pool.slot_size else "",
    )
    label = f"{pool.used} of {len(pool.sequence)} KV slots in use, at most {pool.peak}"
    return panel(
        "KV slots",
        f"{each_holds}{some}now {pool.used:,}, peak {pool.peak:,} of {len(pool.sequence):,}",
        image(width, -(-n // across) * side, label, parts),
        keys,
    )


def latency_panel(view: RunView, width: float = 490) -> str:
    bins, end = view.timeline.histogram()
    latency, n, zero, top = view.timeline.latency(), len(bins), 126, 14
    w, most, total = width / n, max(1, int(bins.max())), int(bins.sum())
    parts = [boxes("line", [(0, zero, width, 1)])]
    high = (bins / most * (zero - top)).tolist()
    parts.append(
        boxes(palette.OKABE_ITO[4], [(i * w, zero - max(h, 1.5), w - 1, max(h, 1.5)) for i, h in enumerate(high) if h])
    )
    if total:
        curve = " ".join(
            f"L{(i + 1) * w:.4g} {zero - v * (zero - top):.4g}"
            for i, v in enumerate((np.cumsum(bins) / total).tolist())
        )
        parts.append(f"<path class='curve' d='M0 {zero} {curve}'/>")
        for i, (name, value) in enumerate((("P50", latency.p50), ("P95", latency.p95), ("P99", latency.p99))):
            at = min(value / end, 1) * width
            anchor = "end" if at > width - 80 else "start"
            parts.append(f"<path stroke='{palette.MARK}' stroke-width='1.5' d='M{at:.4g} {top - 8}V{zero}'/>")
            parts.append(
                text(
                    at + (4 if anchor == "start" else -4),
                    top + i * 14,
                    f"{name} {number(value)}",
                    f"class='fg' text-anchor='{anchor}'",
                )
            )
    for i in range(6):
        anchor = "start" if i == 0 else "end" if i == 5 else "middle"
        parts.append(
            text(width * i / 5, zero + 14, number(end * i / 5) + (" ms" if i == 5 else ""), f"text-anchor='{anchor}'")
        )
    marks = ", ".join(f"{name} {duration(v)}" for name, v in zip(("P50", "P95", "P99"), latency[1:4], strict=True))
    label = f"latency of {total} tokens: {marks}"
    keys = [("tokens", palette.OKABE_ITO[4]), ("share below (line)", "var(--fg)")]
    return panel("Latency", f"ms a token, {latency.n:,} tokens", image(width, zero + 18, label, parts), keys)
