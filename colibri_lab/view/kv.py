"""The KV slot pool: who owns each slot and how full it is."""

from __future__ import annotations

import numpy as np

from colibri_lab.events import SlotKind
from colibri_lab.trace import Batch

_KEPT = 256  # newest sequences whose fill is remembered
_LATER = 64  # rows that wait to be counted: pictures of the pool are fewer than pictures


class SlotView:
    """sequence, layer and owner of each slot, int [S]: the last ones where `free`; sequence is -1 where never used.

    Owner -1 is a shared base slot; double: one of two slots that an expert took at once.
    """

    def __init__(self, slots: int = 0, slot_size: int = 0) -> None:
        self.slot_size = slot_size
        self.sequence, self.layer, self.owner = (np.full(slots, -1, "i8") for _ in range(3))
        self.free, self.double = np.ones(slots, bool), np.zeros(slots, bool)
        self.told_ns = np.zeros(slots, "u8")  # the last event of each slot
        self.peak, self.missing = 0, 0
        self._snapshot_ns = -1
        self._used = 0
        self._fill: dict[int, np.ndarray] = {}  # per sequence: rows written to each slot, but for those that wait
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []  # sequence [n] and slot [n, L] of rows
        self._rows = 0  # of those

    def take(self, batch: Batch) -> None:
        self.missing += batch.missing.get("slots", 0)
        for t, kind, slot, sequence, layer, owner in batch.slots.tolist():
            if t <= self._snapshot_ns:
                known = slot < len(self.told_ns) and self.told_ns[slot] <= t and self.sequence[slot] == sequence
                if known and kind == SlotKind.PAIR:
                    self.double[slot] = True  # the one thing that a snapshot does not know
                continue
            self._grow(slot + 1)
            self.told_ns[slot] = t
            was = self.free[slot]
            if kind != SlotKind.FREE:
                self.sequence[slot], self.layer[slot], self.owner[slot] = sequence, layer, owner
                self.free[slot], self.double[slot] = False, kind == SlotKind.PAIR
            elif self.sequence[slot] == sequence:
                self.free[slot] = True
            self._used += int(was) - int(self.free[slot])
            self.peak = max(self.peak, self._used)
        if len(batch.tokens):
            self._take_rows(batch)

    def snapshot(self, t_ns: int, slots: list[list[int]], more: bool = False) -> None:
        """Who owned which slots at a moment: [slot, sequence, layer, owner, tokens]; more: beside those said before.

        Later events stand. Rows that are later are to be taken after it, as they come in batches.
        """
        if t_ns <= self._snapshot_ns and not more:
            return
        self._count()
        self._snapshot_ns = t_ns
        self._grow(max((row[0] for row in slots), default=-1) + 1)
        if not more:
            self.free[self.told_ns <= t_ns] = True
            for sequence in {row[1] for row in slots}:
                self._fill[sequence] = np.zeros(len(self.sequence), "i8")
        for slot, sequence, layer, owner, tokens in slots:
            if self.told_ns[slot] <= t_ns:
                self.double[slot] &= self.sequence[slot] == sequence
                self.sequence[slot], self.layer[slot], self.owner[slot] = sequence, layer, owner
                self.free[slot] = False
            fill = self._fill.get(sequence, np.zeros(0, "i8"))
            self._fill[sequence] = fill = np.append(fill, np.zeros(max(0, slot + 1 - len(fill)), "i8"))
            fill[slot] = tokens
        self._used = int((~self.free).sum())
        self.peak = max(self.peak, self._used)

    def _take_rows(self, batch: Batch) -> None:
        rows, slot = batch.tokens["sequence"], batch.slot
        if self._snapshot_ns >= 0:
            later = batch.tokens["t_ns"] > self._snapshot_ns
            rows, slot = rows[later], slot[later]
        self._grow(int(slot.max(initial=-1)) + 1)
        self._waiting.append((rows, slot))
        self._rows += len(rows)
        if self._rows > _LATER:
            self._count()

    def _count(self) -> None:
        """Into `_fill` what waits."""
        if not self._waiting:
            return
        rows, slot = (np.concatenate(part) for part in zip(*self._waiting, strict=True))
        self._waiting, self._rows = [], 0
        told, whole = rows.tolist(), int(slot.min(initial=0)) >= 0
        for sequence in set(told):
            slots = slot[[i for i, mine in enumerate(told) if mine == sequence]].ravel()
            counts = np.zeros(len(self.sequence), "i8")
            if (have := self._fill.get(sequence)) is not None:
                counts[: len(have)] = have
            np.add.at(counts, slots if whole else slots[slots >= 0], 1)
            self._fill[sequence] = counts
        if len(self._fill) > _KEPT:
            for old in sorted(self._fill)[:-_KEPT]:
                del self._fill[old]

    def _grow(self, slots: int) -> None:
        more = slots - len(self.sequence)
        if 0 < more and slots <= 1 << 24:
            self.sequence, self.layer, self.owner = (
                np.concatenate([a, np.full(more, -1, "i8")]) for a in (self.sequence, self.layer, self.owner)
            )
            self.free = np.concatenate([self.free, np.ones(more, bool)])
            self.told_ns = np.concatenate([self.told_ns, np.zeros(more, "u8")])
            self.double = np.concatenate([self.double, np.zeros(more, bool)])

    @property
    def kinds(self) -> dict[str, int]:
        """How many slots in use are an expert's own, one of two taken at once (double), or shared (base)."""
        used, base = ~self.free, self.owner < 0
        double = int((used & self.double & ~base).sum())
        return {"own": int((used & ~base).sum()) - double, "double": double, "base": int((used & base).sum())}

    @property
    def used(self) -> int:
        return self._used

    @property
    def fill(self) -> np.ndarray:
        """Rows that the (last) owning sequence wrote to each slot, int64 [S]."""
        return self.filled(np.unique(self.sequence))

    def filled(self, sequences: np.ndarray) -> np.ndarray:
        """As fill, and 0 for the slots of other sequences than these."""
        self._count()
        out = np.zeros(len(self.sequence), "i8")
        for sequence in sequences.tolist():
            counts = self._fill.get(sequence)
            if counts is not None:
                np.copyto(out[: len(counts)], counts, where=self.sequence[: len(counts)] == sequence)
        return out
