"""What the threads of a block did, as one picture: a row for each thread, time to the right, memory below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_lab.view import palette
from colibri_lab.view.svg import STYLE, Box, boxes, image, panel, text

READ, WRITE, BARRIER, WARP = range(4)  # kinds of events, as in the recording
SHARED = 255
LEFT, WIDTH, GAP = 74.0, 980.0, 10.0
COLOURS = {(READ, False): "#56B4E9", (WRITE, False): "#E69F00", (READ, True): "#0072B2", (WRITE, True): "#D55E00"}
WORDS = {(READ, False): "reads memory", (WRITE, False): "writes memory", (READ, True): "reads shared memory",
         (WRITE, True): "writes shared memory"}  # fmt: skip
MEET = "#999999"


class Recorded(Protocol):
    """Events with block, thread, phase, kind, array, line; see ops.recording, which this module does not know."""

    @property
    def kernel(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def events(self) -> NDArray[np.void]: ...
    def name(self, array: int, /) -> str: ...
    def elements(self) -> tuple[NDArray[np.void], NDArray[np.int64]]: ...
    def conflicts(self) -> Sequence[Any]: ...


class Threads:
    """A recording's picture, of one block. ValueError for a block that did nothing."""

    def __init__(self, recording: Recorded, block: int = 0, title: str | None = None) -> None:
        self.recording, self.block = recording, block
        self.title = title or f"{recording.kernel}, block {block}"
        self.events = recording.events[recording.events["block"] == block]
        if not len(self.events):
            raise ValueError(f"{recording.kernel}: block {block} did nothing; it was not launched")
        self.column, self.ends = columns(self.events)

    def _repr_html_(self) -> str:
        parts, below = self._chart()
        more, height = self._memory(below)
        met = [one for one in self.recording.conflicts() if one.block == self.block]
        of = {key: int(((self.events["kind"] == key[0]) & ((self.events["array"] == SHARED) == key[1])).sum())
              for key in COLOURS}  # fmt: skip
        keys = [(f"{WORDS[key]} {n:,}", COLOURS[key]) for key, n in of.items() if n]
        if n := int((self.events["kind"] == WARP).sum()):
            keys.append((f"meets its warp {n:,}", MEET))
        keys.append((f"barriers {len(self.ends) - 1} (line)", "var(--fg)"))
        last = self.recording.threads - 1
        keys += [("below: touched by thread 0", palette.CIVIDIS[0]), (f"by thread {last}", palette.CIVIDIS[63])]
        sub = f"{self.recording.threads} threads, time to the right; "
        sub += str(met[0]) if met else "no two meet without a barrier between"
        label = f"{self.title}: {sub}"
        body = image(WIDTH, height, label, [*parts, *more])
        return f"<div class='clr'><style>{STYLE}</style>{panel(self.title, sub, body, keys)}</div>"

    def __repr__(self) -> str:
        return f"<Threads {self.title}: {len(self.events)} events>"

    def _chart(self) -> tuple[list[str], float]:
        """Threads by columns of time; the y where it ends."""
        high = max(1.0, min(7.0, 330 / self.recording.threads))
        wide = (WIDTH - LEFT) / max(1, self.ends[-1] - 1)
        mark = max(0.6, wide - (1 if wide > 4 else 0.2))
        bottom, parts = self.recording.threads * high, []
        parts.append(boxes("empty", [(LEFT, 0, WIDTH - LEFT, bottom)]))
        shared = self.events["array"] == SHARED
        for key, colour in COLOURS.items():
            rows = (self.events["kind"] == key[0]) & (shared == key[1])
            parts.append(boxes(colour, self._places(rows, wide, high, mark)))
        parts.append(boxes(MEET, self._places(self.events["kind"] == WARP, wide, high, mark)))
        for phase, end in enumerate(self.ends[:-1]):
            x = LEFT + end * wide - wide / 2
            line = self.events["line"][(self.events["kind"] == BARRIER) & (self.events["phase"] == phase)][0]
            parts.append(boxes("fg", [(x - 0.75, 0, 1.5, bottom + 4)]))
            parts.append(text(x, bottom + 15, f"barrier, line {line}", "text-anchor='middle'"))
        for warp in range(0, self.recording.threads, 32):
            parts.append(text(0, warp * high + 10, f"warp {warp // 32}", "class='fg'"))
            if warp:
                parts.append(boxes("line", [(LEFT - 6, warp * high - 0.5, WIDTH - LEFT + 6, 1)]))
        return parts, bottom + 26

    def _places(self, rows: NDArray[np.bool_], wide: float, high: float, mark: float) -> list[Box]:
        gap = 0.8 if high > 3 else 0.0
        pairs = zip(self.column[rows].tolist(), self.events["thread"][rows].tolist(), strict=True)
        return [(LEFT + column * wide, thread * high, mark, high - gap) for column, thread in pairs]

    def _memory(self, top: float) -> tuple[list[str], float]:
        """A strip for each array and kind: its elements in the colour of the thread that came first."""
        events, element = self.recording.elements()
        mine = events["block"] == self.block
        events, element = events[mine], element[mine]
        parts = []
        for array in np.unique(events["array"]).tolist():
            there = events["array"] == array
            low, high = int(element[there].min()), int(element[there].max()) + 1
            for kind, words in ((READ, "read"), (WRITE, "written")):
                rows = there & (events["kind"] == kind)
                if not rows.any():
                    continue
                at, first = np.unique(element[rows], return_index=True)
                by = events["thread"][rows][first] * 63 // max(1, self.recording.threads - 1)
                side = min(14.0, (WIDTH - LEFT - 130) / (high - low))
                for level in np.unique(by).tolist():
                    some = (at[by == level] - low).tolist()
                    parts.append(boxes(palette.CIVIDIS[min(level, 63)],
                                       [(LEFT + i * side, top, side * 0.9, 11) for i in some]))  # fmt: skip
                parts.append(text(0, top + 9, self.recording.name(array), "class='fg'"))
                span = f"{low}" if high - low == 1 else f"{low} to {high - 1}"
                parts.append(text(LEFT + (high - low) * side + 8, top + 9, f"{span}, {words}"))
                top += 11 + GAP / 2
        return parts, top + 2


def columns(events: NDArray[np.void]) -> tuple[NDArray[np.int64], list[int]]:
    """(column of each event, where each phase ends). Threads of a warp stand in line at its operations, those of the
    block at barriers; between two such points each goes on alone."""
    thread, phase = events["thread"].astype(np.int64), events["phase"].astype(np.int64)
    warp, turn = thread // 32, np.zeros(len(events), np.int64)
    column, ends, begin = np.zeros(len(events), np.int64), [], 0
    met = events["kind"] == WARP
    for p in range(int(phase.max()) + 1):
        end = begin
        for w in np.unique(warp[phase == p]).tolist():
            rows = np.flatnonzero((phase == p) & (warp == w))
            for t in np.unique(thread[rows]).tolist():
                mine = rows[thread[rows] == t]
                turn[mine] = np.cumsum(met[mine]) - met[mine]
            at = begin
            for k in range(int(turn[rows].max()) + 1):
                here, most = rows[turn[rows] == k], 0
                for t in np.unique(thread[here]).tolist():
                    mine = here[(thread[here] == t) & (events["kind"][here] <= WRITE)]
                    column[mine] = at + np.arange(len(mine))
                    most = max(most, len(mine))
                column[here[events["kind"][here] > WRITE]] = at + most
                at += most + bool(met[here].any())
            end = max(end, at)
        column[(phase == p) & (events["kind"] == BARRIER)] = end
        begin = end + 1
        ends.append(begin)
    return column, ends
