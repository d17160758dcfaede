"""Which experts the last tokens went to, and which of them are in memory."""

from __future__ import annotations

import numpy as np

from colibri_lab.events import PageKind
from colibri_lab.trace import Batch
from colibri_lab.view.history import History

MAX_WINDOW = 1024
FEW = 64  # events that are quicker one by one than as arrays
FAULT, EVICT, PREFETCH = int(PageKind.FAULT), int(PageKind.EVICT), int(PageKind.PREFETCH)
SENT, LEFT = int(PageKind.SENT), int(PageKind.LEFT)
PIN, UNPIN = int(PageKind.PIN), int(PageKind.UNPIN)  # NumPy compares with plain integers ten times faster
MOVES, PINS, TRAVELS = (FAULT, EVICT, PREFETCH), (PIN, UNPIN), (SENT, LEFT)


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
        self.device = np.zeros((layers, experts), bool)  # in the GPU's memory, whether in the host's or not
        self.sent_pages = 0  # to it
        self.ahead = np.zeros((layers, experts), bool)  # in memory since a prefetcher guessed it
        self.faults = np.zeros((layers, experts), "i8")
        self.last_fault_ns = np.zeros((layers, experts), "u8")
        self.wait_ns, self.evictions, self.missing = 0, 0, 0
        self._moved_ns, self._pinned_ns, self._sent_ns = (
            np.zeros(layers * experts, "u8") for _ in range(3)
        )  # last told
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
        if 0 < len(pages) <= FEW:
            self._take_few(pages.tolist())
        elif len(pages):
            self._take_pages(pages[(pages["layer"] < self.layers) & (pages["expert"] < self.experts)])

    def _take_routes(self, route: np.ndarray) -> None:
        n = len(route)
        if n == 0:
            return
        before = self._recent.rows[-self._window :]
        if n >= self._window:
            self._counts = self._count(route[-self._window :])
        else:
            np.add.at(self._counts, self._cells(route), 1)
            if (old := len(before) + n - self._window) > 0:
                np.subtract.at(self._counts, self._cells(before[:old]), 1)
        self._recent.append(route)

    def _count(self, route: np.ndarray) -> np.ndarray:
        return np.bincount(self._cells(route), minlength=len(self._counts))

    def _cells(self, route: np.ndarray) -> np.ndarray:
        """layer * E + expert of every choice."""
        cells = route + self._offset
        known = route < self.experts  # NO_EXPERT is beyond all
        return cells.ravel() if known.all() else cells[known]

    def _take_few(self, pages: list[tuple[int, ...]]) -> None:
        """As _take_pages: an event at a time, in whole numbers of Python."""
        resident, ahead, pinned = self.resident.ravel(), self.ahead.ravel(), self.pinned.ravel()
        faults, last_fault_ns, device = self.faults.ravel(), self.last_fault_ns.ravel(), self.device.ravel()
        for t, kind, layer, expert, count, wait_ns, _ in pages:
            if layer >= self.layers or expert >= self.experts:
                continue
            cell = layer * self.experts + expert
            if t > self._snapshot_ns and kind in MOVES:
                resident[cell], ahead[cell] = kind != EVICT, kind == PREFETCH
                self._moved_ns[cell] = max(t, int(self._moved_ns[cell]))
            elif t > self._snapshot_ns and kind in PINS:
                pinned[cell] = kind == PIN
                self._pinned_ns[cell] = max(t, int(self._pinned_ns[cell]))
            elif t > self._snapshot_ns and kind in TRAVELS:
                device[cell] = kind == SENT
                self._sent_ns[cell] = max(t, int(self._sent_ns[cell]))
            self.sent_pages += count * (kind == SENT)
            if kind == FAULT:
                faults[cell] += 1
                last_fault_ns[cell] = max(t, int(last_fault_ns[cell]))
                self.wait_ns += wait_ns
            self.evictions += kind == EVICT

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
        travels = later & ((kind == SENT) | (kind == LEFT))
        np.maximum.at(self._sent_ns, cell[travels], pages["t_ns"][travels])
        self.device.ravel()[cell[travels]] = kind[travels] == SENT
        self.sent_pages += int(pages["pages"][kind == SENT].sum(dtype="u8"))
        faults = kind == FAULT
        np.add.at(self.faults.ravel(), cell[faults], 1)
        np.maximum.at(self.last_fault_ns.ravel(), cell[faults], pages["t_ns"][faults])
        self.wait_ns += int(pages["wait_ns"][faults].sum(dtype="u8"))
        self.evictions += int((kind == EVICT).sum())

    def snapshot(self, t_ns: int, resident: list[int], pinned: list[int], ahead: list[int] | None = None,
                 device: list[int] | None = None) -> None:  # fmt: skip
        """What was in memory and pinned at a moment, as layer * E + expert; later events stand, wherever they came.

        ahead: what was in memory since it was guessed; device: what was on the GPU; None where that is not told, and
        then it stands as it was.
        """
        if t_ns <= self._snapshot_ns:
            return
        self._snapshot_ns = t_ns
        states = [(self.resident, self._moved_ns, resident), (self.pinned, self._pinned_ns, pinned)]
        if ahead is not None:
            states.append((self.ahead, self._moved_ns, ahead))
        if device is not None:
            states.append((self.device, self._sent_ns, device))
        for state, told, keys in states:
            then = np.zeros(told.size, bool)
            then[keys] = True
            state.ravel()[told <= t_ns] = then[told <= t_ns]
        self.ahead &= self.resident

    @property
    def share(self) -> np.ndarray:
        """Share of the window's rows that went to each expert, float64 [L, E]; a layer's row sums to top-k."""
        rows = max(1, min(self._recent.total, self._window))
        return self._counts.reshape(self.layers, self.experts) / rows
