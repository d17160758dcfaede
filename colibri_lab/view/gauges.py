"""The engine's counters over time, as telemetry sampled them: series and rates by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np

from colibri_lab.events import GAUGE
from colibri_lab.trace import Batch
from colibri_lab.view.history import History
from colibri_lab.view.html import grid, number

KEPT = 1024  # samples: the last minute or two of a run that works all the time


class Gauges:
    """One row a sample (about ten a second while the engine works), oldest first; names as in `counters()`, nested ones
    joined by dots: "pager.faults"."""

    def __init__(self) -> None:
        self._rows = History(KEPT, GAUGE)
        self.names: tuple[str, ...] = ()
        self.column: dict[str, int] = {}  # of each name in `values`
        self.missing = 0
        self.folded: object = None  # strips.Folded, of the last picture

    @classmethod
    def of(cls, source: Any) -> Gauges:
        """All samples that an engine, its telemetry or a replayed trace still holds."""
        source, gauges = getattr(source, "telemetry", source), cls()
        cursor = source.cursor()
        while True:
            batch = source.read(cursor)
            gauges.take(batch)
            if source.live or not (len(batch) or batch.dropped):
                return gauges

    def take(self, batch: Batch) -> None:
        if len(batch.names) > len(self.names):
            self.names, self.column = batch.names, {name: i for i, name in enumerate(batch.names)}
        self.missing += batch.missing.get("gauges", 0)
        self._rows.append(batch.gauges)

    def __len__(self) -> int:
        return len(self._rows.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.column

    @property
    def total(self) -> int:
        """Samples taken so far, those forgotten with them."""
        return self._rows.total

    @property
    def t_ns(self) -> np.ndarray:
        """u8 [n] of each sample, the engine's perf_counter_ns."""
        return self._rows.rows["t_ns"]

    @property
    def values(self) -> np.ndarray:
        """float64 [n, at least as many as names]: a view, good until the next take."""
        return self._rows.rows["value"]

    @property
    def seconds(self) -> np.ndarray:
        """float64 [n] since the first sample that is kept."""
        t = self.t_ns
        return (t - t[:1]) / 1e9 if len(t) else np.zeros(0)

    def series(self, name: str) -> np.ndarray:
        """float64 [n], NaN where the name had no value yet. KeyError names the nearest names where there is none."""
        return self.values[:, self._at(name)]

    def rate(self, name: str) -> np.ndarray:
        """float64 [n]: what a counter grew by each second since the sample before; NaN for the first."""
        value, t = self.series(name), self.seconds
        out = np.full(len(value), np.nan)
        step = np.diff(t)
        np.divide(np.diff(value), step, out=out[1:], where=step > 0)
        return out

    def last(self, name: str) -> float | None:
        """The newest value; None where there is none."""
        if name not in self.column or not len(self):
            return None
        value = float(self.values[-1, self.column[name]])
        return None if np.isnan(value) else value

    def _at(self, name: str) -> int:
        if name not in self.column:
            near = get_close_matches(name, self.names, 3, 0.5)
            raise KeyError(f"no gauge {name}" + (f"; there are {', '.join(near)}" if near else ""))
        return self.column[name]

    def __repr__(self) -> str:
        return f"<Gauges: {len(self.names)} names, {len(self)} samples>"

    def _repr_html_(self) -> str:
        rows = [
            (name, number(self.last(name)), number(float(np.nanmax(self.rate(name), initial=0)))) for name in self.names
        ]
        return grid(("gauge", "now", "most a second"), rows)
