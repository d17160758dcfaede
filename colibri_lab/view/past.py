"""The last minutes of a run: its newest events, and what the view looked like at any token of them.

Tokens are numbered as they were sampled, from 0, over all sequences; those of one step share its moment. The picture at
a token is the fold of all events up to its moment, which is what a fresh view makes of them (tests/view/test_past.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri_lab.events import SequenceKind
from colibri_lab.streams import LISTS, Streams
from colibri_lab.trace import STREAMS, Batch, Cursor
from colibri_lab.view.remembered import remembered
from colibri_lab.view.run import RunView
from colibri_lab.view.token import TokenDetail

LIMIT = 4 << 20  # bytes of events
PARTS = 16  # in which they come and go
STOPS, NEAR = 8, 64  # copies along the way; tokens from a copy to those beside a token that is looked at
MARKS = 64  # newest beginnings and gaps
_BATCH = 2000  # bytes of a batch beside what its arrays hold
_ARRAYS = ("tokens", "route", "weight", "slot", "pages", "slots", "sequences", "gauges")

Stop = tuple[RunView, Cursor]
Marks = list[tuple[int, int]]


class Past:
    """Keeps at most `limit` bytes of events; what is older is folded into the view from which every other one starts.

    before: a view that has taken nothing. whole: a recorded run, all of which is kept; None: what `add` is given.
    """

    def __init__(self, before: RunView, whole: Streams | None = None, limit: int = LIMIT) -> None:
        self._shape = before.layers, before.n_experts, before.top_k
        self._before, self.limit = before, limit
        self._parts = [whole or Streams.of(*self._shape, [])]
        self._loose: list[Batch] = []  # newer than the parts
        self._bytes = self._loose_bytes = 0
        self._stops: dict[int, Stop] = {}
        self._near: tuple[int, Stop] | None = None
        self._gone, self._gone_ns = dict.fromkeys(STREAMS, 0), 0
        self.last = len(self._parts[0].moments) - 1  # number of the newest token
        # starts: (number of its first token, sequence); gaps: (number of the token after it, rows missed)
        self.marks: dict[str, Marks] = {"starts": [], "gaps": []}
        self._mark(_starts(self._parts[0]["sequences"], self._parts[0].moments, 0), self._parts[0].gaps)

    @property
    def first(self) -> int:
        """Number of the oldest token that can be looked at; past `last` where there is none."""
        return self._before.timeline.sampled

    @property
    def about(self) -> dict[str, Any]:
        """engine.describe() as it was when what is kept began."""
        return self._before.about

    def add(self, batch: Batch) -> None:
        """What was read since the last time."""
        self._loose.append(batch)
        moments, missed = batch.tokens["t_ns"][batch.tokens["token"] >= 0], batch.missing.get("tokens")
        if missed or len(batch.sequences):
            gaps = [(self.last + 1, missed)] if missed else []
            self._mark(_starts(batch.sequences, moments, self.last + 1), gaps)
        self.last += len(moments)
        lists = sum(size * len(getattr(batch, name)) for name, size in LISTS.items())
        self._loose_bytes += _BATCH + lists + sum(getattr(batch, name).nbytes for name in _ARRAYS)
        if self._loose_bytes > self.limit // PARTS:
            self._close()
            while self._bytes > self.limit:
                self._forget()

    def at(self, token: int) -> Stop:
        """(the view at a token, a cursor that stands behind it). ValueError where nothing was sampled yet.

        A token that is kept no more gives the oldest, one that is not there yet the newest.
        """
        moments, place = self._moments(), self._place(token)
        every = NEAR
        while every * STOPS < len(moments):
            every *= 2
        near = max(0, place - 1) // NEAR * NEAR
        known: dict[int, Stop] = {-1: (self._before, Cursor()), **self._stops}
        if self._near is not None:
            known[self._near[0]] = self._near[1]
        at = max(stop for stop in known if stop <= near)
        view, cursor = _twin(known[at])
        for stop in sorted({near, *range(every, near, every)}):
            if stop > at:
                self._fold(view, cursor, int(moments[stop]))
                self._near = stop, _twin((view, cursor))
                if stop % every == 0:
                    self._stops[stop] = self._near[1]
        self._fold(view, cursor, int(moments[place]))
        return view, cursor

    def beside(self, token: int, by: int) -> int:
        """The number of the last token of the step that is `by` steps from this one's."""
        moments = self._moments()
        steps = np.unique(moments)
        at = int(np.searchsorted(steps, moments[self._place(token)])) + by
        moment = steps[min(max(at, 0), len(steps) - 1)]
        return self.first + int(np.searchsorted(moments, moment, "right")) - 1

    def detail(self, token: int) -> TokenDetail:
        """Of one token. ValueError where it is kept no more, or not there yet."""
        if not self.first <= token <= self.last:
            kept = f"{self.first} to {self.last} are kept" if self.last >= self.first else "none is kept"
            raise ValueError(f"token {token} is not kept: {kept}")
        self._moments()
        return TokenDetail.of(self._parts[0], token - self.first, token)

    def find(self, sequence: int, position: int) -> int:
        """The number of the token at a position of a sequence. ValueError where it is kept no more."""
        rows = self._whole()["tokens"]
        mine = (rows["sequence"] == sequence) & (rows["position"] == position - 1) & (rows["token"] >= 0)
        if not mine.any():
            raise ValueError(f"the token at position {position} of request {sequence} is no longer kept")
        return self.first + int((rows["token"][: int(np.flatnonzero(mine)[-1])] >= 0).sum())

    def rest(self) -> None:
        """Nobody looks any more: the copies along the way go."""
        self._stops, self._near = {}, None

    def events(self) -> Streams:
        """All that is kept, for a file: begun with what a reader must know of the time before, and how much it was."""
        whole = self._whole()
        if not any(self._gone.values()):
            return whole
        known = remembered(self._before, self._gone_ns)
        left = {name: n - len(getattr(known, name)) for name, n in self._gone.items()}
        known.missing = {name: n for name, n in left.items() if n > 0}
        return Streams.of(*self._shape, [known, whole])

    def _whole(self) -> Streams:
        """All in one part. What a token's step did may have been read after its row, so nothing is left out."""
        self._close()
        if len(self._parts) > 1:
            self._parts = [Streams.of(*self._shape, self._parts)]
        return self._parts[0]

    def _moments(self) -> np.ndarray:
        if self.last < self.first:
            raise ValueError("there is nothing to go back to: no token was sampled yet")
        return self._whole().moments

    def _place(self, token: int) -> int:
        return min(max(token, self.first), self.last) - self.first

    def _fold(self, view: RunView, cursor: Cursor, t_ns: int) -> None:
        whole = self._parts[0]
        while len(batch := whole.read_until(cursor, t_ns)) or batch.dropped:
            view.take(batch)

    def _close(self) -> None:
        """What is loose becomes a part."""
        if self._loose:
            self._parts.append(Streams.of(*self._shape, self._loose))
            self._loose, self._loose_bytes = [], 0
            self._bytes = sum(part.nbytes for part in self._parts)

    def _forget(self) -> None:
        """The oldest tokens move into the view before all others; of a part without tokens everything does."""
        self.rest()
        part, cursor = self._parts[0], Cursor()
        moments = part.moments
        all_of_it = part.nbytes <= 2 * self.limit // PARTS
        self._gone_ns = int(moments[-1 if all_of_it else len(moments) // 4]) if len(moments) else part.end_ns
        while len(batch := part.read_until(cursor, self._gone_ns if len(moments) else None)) or batch.dropped:
            self._before.take(batch)
            for name in STREAMS:
                self._gone[name] += len(getattr(batch, name)) + batch.missing.get(name, 0)
        left, self._parts = part.rest(cursor), self._parts[1:]
        if left:
            self._parts[:1] = [Streams.of(*self._shape, [*left, *self._parts[:1]])]
        self._bytes = sum(part.nbytes for part in self._parts)
        self._mark([], [])

    def _mark(self, starts: Marks, gaps: Marks) -> None:
        new, first = {"starts": starts, "gaps": gaps}, self.first
        self.marks = {
            name: [mark for mark in marks + new[name] if mark[0] >= first][-MARKS:]
            for name, marks in self.marks.items()
        }


def _starts(sequences: np.ndarray, moments: np.ndarray, first: int) -> Marks:
    """(number of its first token, sequence) of those that began; `first` is the number of the first moment's token."""
    begun = sequences[sequences["kind"] == SequenceKind.START]
    numbers = first + np.searchsorted(moments, begun["t_ns"], "left")
    return list(zip(numbers.tolist(), begun["sequence"].tolist(), strict=True))


def _twin(stop: Stop) -> Stop:
    view, cursor = stop
    return view.copy(), Cursor(dict(cursor.at), dict(cursor.gaps))
