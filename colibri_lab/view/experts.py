"""Which experts the last tokens went to, and which of them are in memory."""

from __future__ import annotations

import numpy as np

from colibri_lab.events import NO_EXPERT, PageKind
from colibri_lab.trace import Batch
from colibri_lab.view.history import History

MAX_WINDOW = 1024
FAULT, EVICT, PREFETCH = int(PageKind.FAULT), int(PageKind.EVICT), int(PageKind.PREFETCH)
PIN, UNPIN = int(PageKind.PIN), int(PageKind.UNPIN)  # NumPy compares with plain integers ten times faster


class ExpertView:
    """Counts are whole numbers over a window of rows, so that no way of batching the same events changes them."""

    def __init__(self, layers: int, experts: int, top_k: int, window: int = 64) -> None:
        self.layers, self.experts = layers, experts
        self._window, self._n = window, 0
        self._recent = History(MAX_WINDOW, "u2", (layers, top_k))
        self._offset = (np.arange(layers) * experts)[:, None]  # [L, 1]
        self._counts = np.zeros(layers * experts, "i8")
        self.resident = np.zeros((layers, experts), bool)
        self.pinned = np.zeros((layers, experts), bool)
        self.ahead = np.zeros((layers, experts), bool)  # in memory since a prefetcher guessed it
        self.faults = np.zeros((layers, experts), "i8")
        self.last_fault_ns = np.zeros((layers, experts), "u8")
        self.wait_ns, self.evictions, self.missing = 0, 0, 0
        self._moved_ns, self._pinned_ns = (np.zeros(layers * experts, "u8") for _ in range(2))  # last told of each cell
        self._snapshot_ns = -1

    @property
    def window(self) -> int:
        """How many of the newest rows `share` looks at, 1 to 1024."""
        return self._window

    @window.setter
    def window(self, rows: int) -> None:
        self._window = int(min(max(rows, 1), MAX_WINDOW))
        self._counts = self._count(self._recent.rows[-self._window :])

    def take(self, batch: Batch) -> None:
        self._take_routes(batch.route)
        pages = batch.pages
        self.missing += batch.missing.get("pages", 0)
        if len(pages):
            self._take_pages(pages[(pages["layer"] < self.layers) & (pages["expert"] < self.experts)])

    def _take_routes(self, route: np.ndarray) -> None:
        n = len(route)
        if n == 0:
            return
        before = self._recent.rows[-self._window :]
        if n >= self._window:
            self._counts = self._count(route[-self._window :])
        else:
            self._counts += self._count(route) - self._count(before[: max(0, len(before) + n - self._window)])
        self._recent.append(route)

    def _count(self, route: np.ndarray) -> np.ndarray:
        flat = (route + self._offset)[(route != NO_EXPERT) & (route < self.experts)]
        return np.bincount(flat, minlength=len(self._counts)).astype("i8")

    def _take_pages(self, pages: np.ndarray) -> None:
        kind, cell = pages["kind"], pages["layer"].astype("i8") * self.experts + pages["expert"]
        comes = (kind == FAULT) | (kind == PREFETCH)
        later = pages["t_ns"] > self._snapshot_ns  # what a snapshot knows already changes no state
        moves = later & (comes | (kind == EVICT))
        self.resident.ravel()[cell[moves]] = comes[moves]  # the last write of a cell wins, as events come in order
        self.ahead.ravel()[cell[moves]] = kind[moves] == PREFETCH
        pins = later & ((kind == PIN) | (kind == UNPIN))
        np.maximum.at(self._moved_ns, cell[moves], pages["t_ns"][moves])
        np.maximum.at(self._pinned_ns, cell[pins], pages["t_ns"][pins])
        self.pinned.ravel()[cell[pins]] = kind[pins] == PIN
        faults = kind == FAULT
        np.add.at(self.faults.ravel(), cell[faults], 1)
        np.maximum.at(self.last_fault_ns.ravel(), cell[faults], pages["t_ns"][faults])
        self.wait_ns += int(pages["wait_ns"][faults].sum(dtype="u8"))
        self.evictions += int((kind == EVICT).sum())

    def snapshot(self, t_ns: int, resident: list[int], pinned: list[int]) -> None:
        """What was in memory and pinned at a moment, as layer * E + expert; later events stand, wherever they came."""
        if t_ns <= self._snapshot_ns:
            return
        self._snapshot_ns = t_ns
        for state, told, keys in ((self.resident, self._moved_ns, resident), (self.pinned, self._pinned_ns, pinned)):
            then = np.zeros(told.size, bool)
            then[keys] = True
            state.ravel()[told <= t_ns] = then[told <= t_ns]
        self.ahead &= self.resident

    @property
    def share(self) -> np.ndarray:
        """Share of the window's rows that went to each expert, float64 [L, E]; a layer's row sums to top-k."""
        rows = max(1, min(self._recent.total, self._window))
        return self._counts.reshape(self.layers, self.experts) / rows
