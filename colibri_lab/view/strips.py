"""The systems' counters as columns of a strip: what each column's time saw, at most MOST of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from colibri_lab.view.gauges import Gauges
from colibri_lab.view.html import size
from colibri_lab.view.systems import SYSTEMS

MOST = 48
MARKS, WORDS = 4, 100  # notes that are marked, characters of each
FULL, NONE = 254, 255  # of a byte: the top of a lane, no value


class Plan(NamedTuple):
    """How lines are made of a table's columns: each of its values is a sum of few. All systems' lines together.

    part, whole int [lines, few]: the columns that are added up; known bool [lines]: whether any of its
    counters is there; lane int [lines], counted over all systems; stacked float64 [lanes, lines] 1 where a line is one
    of those that a lane stacks; sums int [names, few]: which counters each figure adds up, see FIGURES. Places that are
    left over name a column of nothing.
    """

    part: np.ndarray
    whole: np.ndarray
    known: np.ndarray
    lane: np.ndarray
    stacked: np.ndarray
    sums: np.ndarray


LINES = [(i, line) for i, system in enumerate(SYSTEMS) for line in system.lines]
LANES = [lane for system in SYSTEMS for lane in system.lanes]
_SYSTEM_OF = [i for i, _ in LINES]
FIXED = np.array([lane.top for lane in LANES])
# what is added up of the newest sample: both parts of every fact, then what says whether a system is on
FIGURES = [names for system in SYSTEMS for fact in system.facts for names in (fact.of, fact.over)]
FIGURES += [system.on for system in SYSTEMS]
FIRST_LANE = np.cumsum([0, *(len(system.lanes) for system in SYSTEMS)]).tolist()
FIRST_FACT = np.cumsum([0, *(2 * len(system.facts) for system in SYSTEMS)]).tolist()
FIRST_LINE = np.cumsum([0, *(len(system.lines) for system in SYSTEMS)]).tolist()


FACTS = [[1 + bool(fact.over) for fact in system.facts] for system in SYSTEMS]


@lru_cache(4)
def plan(names: tuple[str, ...]) -> Plan:
    """For a table of these columns: growth of each name, level of each name, seconds, 1, 0."""
    n, column = len(names), {name: i for i, name in enumerate(names)}
    part, whole = list[list[int]](), list[list[int]]()
    lane, stacked = np.zeros(len(LINES), int), np.zeros((len(LANES), len(LINES)))
    for j, (system, line) in enumerate(LINES):
        shift = n if line.level else 0
        for to, of in ((part, line.of), (whole, line.over)):
            to.append([shift + column[name] for name in of if name in column])
        if not line.over or line.over == ("seconds",):
            whole[-1] = [2 * n if line.over else 2 * n + 1]
        lane[j] = FIRST_LANE[system] + line.lane
        stacked[lane[j], j] = line.draw == "stack"
    known = np.array([bool(of and over) for of, over in zip(part, whole, strict=True)])
    sums = [[column[name] for name in counters if name in column] for counters in FIGURES]
    return Plan(_filled(part, 2 * n + 2), _filled(whole, 2 * n + 2), known, lane, stacked, _filled(sums, n))


def _filled(places: list[list[int]], nothing: int) -> np.ndarray:
    most = max(map(len, places))
    return np.array([row + [nothing] * (most - len(row)) for row in places], int)


class Folded(NamedTuple):
    """The columns of the last picture, most of which are in the next one too: what was sampled does not change.

    begins, ends int64 [N] in samples since the first ever; values float64 [lines, N].
    """

    names: tuple[str, ...]
    begins: np.ndarray
    ends: np.ndarray
    values: np.ndarray


def _values(gauges: Gauges, made: Plan, rows: np.ndarray) -> np.ndarray:
    """float64 [lines, len(rows) - 1]: what lies between one of these samples and the next."""
    first = gauges.total - len(gauges)
    begins, ends, last = rows[:-1] + first, rows[1:] + first, gauges.folded
    out, new = np.empty((len(LINES), len(ends))), np.ones(len(ends), bool)
    if isinstance(last, Folded) and last.names == gauges.names and len(last.ends):
        at = np.minimum(last.ends.searchsorted(ends), len(last.ends) - 1)
        new = (last.ends[at] != ends) | (last.begins[at] != begins)
        out[:, ~new] = last.values[:, at[~new]]
    out[:, new] = _fold(gauges, made, rows[:-1][new], rows[1:][new])
    gauges.folded = Folded(gauges.names, begins, ends, out)
    return out


def _fold(gauges: Gauges, made: Plan, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    n = len(gauges.names)
    table = np.zeros((len(ends), 2 * n + 3))
    level = table[:, n : 2 * n] = _plain(gauges.values[ends, :n])
    table[:, :n] = np.maximum(level - _plain(gauges.values[begins, :n]), 0)
    table[:, 2 * n] = (gauges.t_ns[ends].astype("i8") - gauges.t_ns[begins].astype("i8")) / 1e9
    table[:, 2 * n + 1] = 1
    part, whole = table[:, made.part].sum(axis=2).T, table[:, made.whole].sum(axis=2).T
    out = np.full(part.shape, np.nan)
    np.divide(part, whole, out=out, where=(whole > 0) & made.known[:, None])
    return out


def _plain(values: np.ndarray) -> np.ndarray:
    """With 0 for no value."""
    return np.where(values == values, values, 0.0)


class Window:
    """The kept samples in columns of 1, 2, 4.. samples, counted from the first ever, so that none flickers.

    ends_ns u8 [N]; values float64 [lines of all systems, N], NaN where a line has none; tops float64 [lanes of all
    systems]: the end of each scale, 0 where a lane has no value; on: for each system whether it works.
    """

    def __init__(self, gauges: Gauges, most: int = MOST) -> None:
        kept, total, every = len(gauges), gauges.total, 1
        while kept > every * (most - 1):
            every *= 2
        ends = np.arange(every - 1 - (total - kept) % every, kept, every)
        ends = ends[ends > 0]
        if kept > 1 and (not len(ends) or ends[-1] < kept - 1):
            ends = np.append(ends, kept - 1)
        rows = np.concatenate([[0], ends]) if len(ends) else np.zeros(0, "i8")
        t, n = gauges.t_ns[rows], len(gauges.names)
        self.begin_ns, self.ends_ns = int(t[0]) if len(t) else 0, t[1:]
        made = plan(gauges.names)
        newest = np.full(n + 1, np.nan)
        if kept:
            newest[:n] = gauges.values[-1, :n]
        each = newest[made.sums]
        there = (each == each).any(axis=1).tolist()
        figures = [round(v, 9) if v % 1 else int(v) for v in _plain(each).sum(axis=1).tolist()]
        self._figures = [v if some else None for v, some in zip(figures, there, strict=True)]
        self.on = [bool(v) for v in self._figures[FIRST_FACT[-1] :]]
        self.values = _values(gauges, made, rows)
        self._there = self.values == self.values
        self._plain = plain = np.where(self._there, self.values, 0.0)
        self.tops = (made.stacked @ plain).max(axis=1, initial=0)
        np.maximum.at(self.tops, made.lane, plain.max(axis=1, initial=0))
        self.tops[(FIXED > 0) & (self.tops > 0)] = FIXED[(FIXED > 0) & (self.tops > 0)]
        self._lane = made.lane

    def __len__(self) -> int:
        return len(self.ends_ns)

    @property
    def drawn(self) -> list[int]:
        """Lines that have something to draw, counted over all systems."""
        some = self._there.any(axis=1) & (self.tops > 0)[self._lane]
        return [j for j, there in enumerate(some.tolist()) if there and self.on[_SYSTEM_OF[j]]]

    def bytes(self, lines: list[int]) -> np.ndarray:
        """u1 [lines, N]: shares of their lanes' tops in 1/254, 255 where there is no value."""
        share = self._plain[lines] * (FULL / self.tops[self._lane[lines]])[:, None]
        return np.where(self._there[lines], np.rint(np.minimum(share, FULL)), NONE).astype("u1")

    def facts(self, which: int) -> list[list[float | None]]:
        """Of a system: [value], or [part, whole], of each fact; None where no counter of that name is there."""
        first = FIRST_FACT[which]
        return [self._figures[first + 2 * i : first + 2 * i + n] for i, n in enumerate(FACTS[which])]


def packed(window: Window) -> tuple[dict[str, Any], np.ndarray]:
    """For a frame: {"systems": [{on, tops, facts}], "rows": the lines that have values}; u1 [rows, N].

    Whole numbers up to 254 come back exactly from a byte's share of its lane's top.
    """
    told: list[dict[str, Any]] = []
    for i, (on, first) in enumerate(zip(window.on, FIRST_LANE, strict=False)):
        tops = window.tops[first : FIRST_LANE[i + 1]].tolist()
        facts = window.facts(i) if on else []
        told.append({"on": on, "tops": [top and float(f"{top:.6g}") for top in tops], "facts": facts})
    rows = window.drawn
    return {"systems": told, "rows": rows}, window.bytes(rows)


def marks(notes: Iterable[tuple[str, Any, int]], window: Window, key: str) -> list[tuple[int, str]]:
    """(column, words) of the newest notes of a key that fall into the columns."""
    ends = window.ends_ns
    mine = [(at, value) for name, value, at in notes if name == key and at > window.begin_ns and len(ends)]
    column = [min(int(np.searchsorted(ends, at)), len(ends) - 1) for at, _ in mine]
    return [(i, said(value)) for i, (_, value) in zip(column, mine, strict=True)][-MARKS:]


def said(value: Any) -> str:
    """A note in words: its reason, or its fields."""
    if not isinstance(value, dict):
        return str(value)[:WORDS]
    if "reason" in value:
        changed = ", ".join(f"{name} {value[name]}" for name in ("before", "after") if name in value)
        return f"{changed}: {value['reason']}".lstrip(": ")[:WORDS]
    sizes = {k: size(v) if k.endswith("_bytes") and isinstance(v, int) else v for k, v in value.items()}
    return ", ".join(f"{name} {words}" for name, words in sizes.items())[:WORDS]
