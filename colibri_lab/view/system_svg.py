"""A system's panel as SVG and a table: the board's twin for pages without a kernel."""

from __future__ import annotations

from html import escape

import numpy as np

from colibri_lab.view import palette
from colibri_lab.view.html import duration, number, percent, size, table, words
from colibri_lab.view.run import RunView
from colibri_lab.view.strips import FIRST_LANE, FIRST_LINE, Window, marks
from colibri_lab.view.svg import boxes, image, panel, text
from colibri_lab.view.systems import SYSTEMS, Fact, Lane, Line, System

LEFT, TALL, WIDTH = 64.0, 190.0, 700.0


def system_panel(view: RunView, system: System) -> str:
    """Its counters over the time that is kept, and their figures of the whole run; one line where it is off."""
    window, which = Window(view.gauges), SYSTEMS.index(system)
    if not window.on[which]:
        return panel(system.title, "off", f"<p class='off'>{escape(system.off)}</p>", [])
    lines, tops = FIRST_LINE[which], window.tops[FIRST_LANE[which] :]
    mine = [(line, window.values[lines + i]) for i, line in enumerate(system.lines) if lines + i in window.drawn]
    lanes = sorted({line.lane for line, _ in mine})
    high, parts, keys = TALL / max(1, len(lanes)), list[str](), [(line.label, line.colour) for line, _ in mine]
    for at, lane in enumerate(lanes):
        shown = [(line, values) for line, values in mine if line.lane == lane]
        parts += _lane(system.lanes[lane], shown, float(tops[lane]), at * high + 15, (at + 1) * high - 4)
    said = marks(view.notes, window, system.notes)
    w = (WIDTH - LEFT) / max(1, len(window))
    parts.append(boxes(palette.MARK, [(LEFT + (i + 1) * w - 1, 0, 1.5, TALL) for i, _ in said]))
    facts = {fact.label: told(fact, of) for fact, of in zip(system.facts, window.facts(which), strict=True)}
    label = f"{system.title}: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    changes = "".join(f"<li>{escape(change)}</li>" for _, change in said)
    changes += "".join(f"<li>⚠ {escape(w)}</li>" for w in (view.warnings if system.name == "router" else ()))
    body = f"<div class='split'>{image(WIDTH, TALL, label, parts)}<div>{table(facts)}<ul>{changes}</ul></div></div>"
    return panel(
        system.title,
        f"the last {duration((int(window.ends_ns[-1]) - window.begin_ns) / 1e6)}" if len(window) else "",
        body,
        keys,
    )


def _lane(lane: Lane, lines: list[tuple[Line, np.ndarray]], top: float, up: float, zero: float) -> list[str]:
    n = len(lines[0][1])
    w = (WIDTH - LEFT) / n
    x, base = LEFT + np.arange(n) * w, np.zeros(n)
    parts = [boxes("line", [(LEFT, zero, WIDTH - LEFT, 1), (LEFT, up, WIDTH - LEFT, 1)])]
    parts += [text(LEFT, up - 4, lane.title), text(LEFT - 5, up + 5, unit(lane, top), "text-anchor='end'")]
    parts += [text(LEFT - 5, zero + 1, 0, "text-anchor='end'")]
    for line, values in lines:
        tall = np.nan_to_num(values) / top * (zero - up)
        if line.draw == "stack":
            base += tall
            parts.append(boxes(line.colour, zip(x, zero - base, np.full(n, max(w - 0.7, 0.3)), tall, strict=True)))
            continue
        steps = [f"{a:.4g},{zero - v:.4g} {a + w:.4g},{zero - v:.4g}" for a, v in zip(x, tall, strict=True)]
        known, dash = np.isfinite(values), " stroke-dasharray='5 3'" if line.draw == "dashes" else ""
        runs = np.split(np.arange(n), np.flatnonzero(np.diff(known.astype("i1"))) + 1)
        parts += [
            f"<polyline fill='none' stroke='{line.colour}' stroke-width='1.8'{dash} "
            f"points='{' '.join(steps[i] for i in run)}'/>"
            for run in runs
            if known[run[0]]
        ]
    return parts


def unit(lane: Lane, value: float) -> str:
    """A value of a lane in words."""
    if lane.unit == "share":
        return percent(value)
    if lane.unit == "permille":
        return percent(value / 1000)
    if lane.unit == "bytes/s":
        return f"{size(value)}/s"
    if lane.unit == "s/s":
        return f"{duration(value * 1000)}/s"
    return words(int(value)) if value % 1 == 0 else number(value)


def told(fact: Fact, figures: list[float | None]) -> str:
    """A figure in words; off where no counter of its name is there."""
    value, whole = figures[0], figures[1] if fact.over else None
    if value is None:
        return "off"
    if fact.kind == "ratio":
        return number(value / whole) if whole else "–"
    plain = size(value) if fact.kind == "bytes" else duration(value * 1000) if fact.kind == "seconds" else words(value)
    return f"{plain} ({percent(value / whole)})" if whole else plain
