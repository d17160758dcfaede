"""Benchmarks as one HTML file: a table and a picture for each, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from colibri_lab.bench.result import NOISY, machine
from colibri_lab.bench.suite import Part
from colibri_lab.view import palette
from colibri_lab.view.html import grid, table, words
from colibri_lab.view.report import card, document
from colibri_lab.view.svg import Box, boxes, image, panel, text

COLUMNS = ("what", "value", "unit", "peer", "peer_value", "ratio", "limit", "share")
HEADER = ("what", "measured", "unit", "peer", "peer's", "ratio", "limit", "share")
MOST = 24  # bars of a picture
LEFT, RIGHT, LINE = 360, 940, 19  # where bars begin, where 1 or the longest ends, pixels from bar to bar


def page(parts: Sequence[Part], command: str = "colibri-lab bench all") -> str:
    """The whole document; `command` made it."""
    facts = table({name.replace("_", " "): value for name, value in machine().items()})
    listed = grid(("benchmark", "seconds", "state"), [(part.name, part.seconds, _state(part)) for part in parts])
    body = f"<h1>Benchmarks</h1><p class='under'>Colibri Lab · {escape(command)}</p>"
    body += f"<div class='two'>{card('Machine', facts)}{card('Runs', listed)}</div>"
    body += "".join(_part(part) for part in parts)
    return document("Colibri Lab: benchmarks", body)


def _state(part: Part) -> str:
    if part.form is None:
        return part.error
    return "noisy: not to be trusted" if part.code == NOISY else "quiet"


def _part(part: Part) -> str:
    title = " ".join(("bench", part.name, *part.arguments))
    if part.form is None:
        return card(title, f"<p class='off'>{escape(part.error)}</p>")
    rows = part.form["rows"]
    pictures = _bars(f"{part.name}: times the peer", rows, "ratio", palette.HIT)
    pictures += _bars(f"{part.name}: share of the limit", rows, "share", palette.MEMORY)
    said = [*part.form["notes"], *(f"noisy: {reason}" for reason in part.form["reasons"])]
    notes = "".join(f"<p class='off'>{escape(note)}</p>" for note in said)
    return pictures + card(title, grid(HEADER, [[row[name] for name in COLUMNS] for row in rows]) + notes)


def _bars(title: str, rows: Sequence[dict[str, Any]], which: str, colour: str) -> str:
    """Bars of the rows that have this figure, a line where it is 1; empty where none has."""
    have = [row for row in rows if row[which] is not None]
    if not have:
        return ""
    shown = have[:MOST]
    longest = max(1.0, *(min(row[which], 10.0) for row in shown))  # one far outlier must not hide the others
    width = RIGHT - LEFT
    bars: list[Box] = []
    marks: list[str] = []
    for i, row in enumerate(shown):
        long = width * max(0.0, min(row[which], longest)) / longest
        bars.append((LEFT, i * LINE + 4, max(long, 1), LINE - 7))
        marks.append(text(LEFT - 8, i * LINE + 14, row["what"][:58], "text-anchor='end'"))
        marks.append(text(LEFT + long + 5, i * LINE + 14, words(row[which]), "class='fg'"))
    height = len(shown) * LINE + 4
    one = [(LEFT + width / longest, 0.0, 1.0, float(height))]
    picture = image(1000, height, title, [boxes(colour, bars), boxes("fg", one), *marks])
    sub = "the line is 1" if len(have) == len(shown) else f"the line is 1; the first {MOST} of {len(have)}"
    return panel(title, sub, picture, [])
