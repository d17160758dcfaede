"""Runs kept and compared, in what a lab and a player have in common; the board's card shows the same."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from colibri_lab.view.curves import Curves
from colibri_lab.view.kept import Comparison, Runs
from colibri_lab.view.run import RunView
from colibri_lab.view.runs import Run
from colibri_lab.widgets.alone import view_of
from colibri_lab.widgets.board import Board
from colibri_lab.widgets.explore import explore
from colibri_lab.widgets.whatif import WhatIf


class Study:
    """`runs` holds what was kept; nothing of it is drawn from the frame, so a board at rest costs nothing."""

    board: Board
    view: RunView
    source: Any  # a Source
    state: Any

    @cached_property
    def runs(self) -> Runs:
        """The kept runs: a table that is shown, exported (`to_csv`, `to_parquet`, `to_markdown`) and compared."""
        return Runs()

    def keep(self, name: str | None = None) -> Run:
        """Freezes the run since the last start under a name (none: the next letter); the same name replaces.

        ValueError where nothing ran yet, or for a name that is empty or longer than 40 characters.
        """
        run = self.runs.add(self.board.now(lambda view: view.keep(self.runs.free() if name is None else name)))
        self._pair = (list(self.runs)[-2:][0], run.name)
        self._tell()
        return run

    def compare(self, a: str | None = None, b: str | None = None) -> Comparison:
        """Two kept runs side by side, with differences in per cent; without names the last two."""
        return self.runs.compare(a, b)

    def explore(self) -> Any:
        """One plotly FigureWidget over the run that is kept, to zoom into; it stands still.

        ValueError where nothing ran yet; NotAvailable without plotly.
        """
        return self.board.now(explore)

    @property
    def whatif(self) -> Curves:
        """What each policy, and Belady, would have hit at 10 to 100 % of all experts, over the run so far.

        The caches see the trace from its beginning, or from its last gap. Takes milliseconds a token once.
        """
        found = self.board.now(lambda _: self._ahead.figure())
        found.live = lambda: view_of(self.board.panel("whatif"))
        return found

    @cached_property
    def _ahead(self) -> WhatIf:
        return WhatIf(self.source, self.view.about)

    def look_aside(self) -> None:
        """A little of the what-if's work: 10 ms a second while generating, most of the time at rest."""
        now, busy = time.monotonic(), self.state in ("generating", "replay", "stopping")
        if busy and now - self._looked < 1:
            return
        self._looked = now
        self._ahead.feed()
        self._ahead.shadow.work(0.01 if busy else 0.05, bounds=not busy)
        self.board.whatif = self._ahead.told()

    _looked = 0.0

    def studied(self, message: dict[str, Any]) -> bool:
        """Does what a person asked of the card; False where the message is not for it."""
        what = message["do"]
        if what == "keep":
            self.keep(str(message["name"]).strip() or None)
        elif what == "compare":
            self._pair = (self.runs[str(message["a"])].name, self.runs[str(message["b"])].name)
            self._tell()
        elif what == "forget":
            del self.runs[str(message["name"])]
            self._pair = tuple(name for name in self._pair if name in self.runs)
            self._tell()
        else:
            return False
        return True

    _pair: tuple[str, ...] = ()

    def _tell(self) -> None:
        """The card's contents, sent when they change and not with frames."""
        names = list(self.runs)
        shown = [name for name in self._pair if name in self.runs] or names[-1:]
        told: dict[str, Any] = {"names": names, "next": self.runs.free(), "a": "", "b": "", "rows": [], "verdict": ""}
        if shown:
            a, b = self.runs[shown[0]], self.runs[shown[-1]]
            both = Comparison(a, b)
            rows = both.rows() if a is not b else [(*row[:2], "", "") for row in both.rows()]
            told |= {"a": a.name, "b": b.name if a is not b else "", "rows": rows}
            told["verdict"] = both.verdict if a is not b else "keep another run to compare it with this one"
            told["better"] = {line.label: line.better for line in both.lines if line.better and a is not b}
        self.board.study = told
