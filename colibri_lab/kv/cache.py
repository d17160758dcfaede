"""The KV cache of all sequences: a page table per seat and layer over one slot pool."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SlotsExhausted
from ..events import SlotKind
from ..ops.types import KVPool
from .rule import BASE, FirstExperts, PlacementRule
from .slots import SlotPool


class _Layer:
    """One sequence's slots in one layer: owner -> slots, the last of which takes the next token."""

    __slots__ = ("base", "own")

    def __init__(self) -> None:
        self.own: dict[int, list[int]] = {}
        self.base: list[int] = []

    def all(self) -> list[int]:
        return [slot for slots in (*self.own.values(), self.base) for slot in slots]


class KVCache:
    """Seats (one per running sequence) with their page tables.

    on_slot(t_ns, kind, slot, sequence, layer, owner) is told of each slot taken and given back.
    A step in which a sequence finds no slot ends with SlotsExhausted; `rewind` then undoes what it placed.
    """

    def __init__(self, pool: KVPool, slots: SlotPool, layers: int, kv_dst: NDArray[np.int32],
                 rule: PlacementRule | None = None, on_slot: Any = None) -> None:  # fmt: skip
        self.pool, self.slots, self.layers = pool, slots, layers
        self.on_slot = on_slot
        self._rule = rule or FirstExperts()
        self._dst = kv_dst
        self._tables: list[list[_Layer]] = [[] for _ in range(pool.where.shape[0])]
        self._sequence = [0] * len(self._tables)
        self._free_seats = list(range(len(self._tables) - 1, -1, -1))
        self._seats: Sequence[int] = ()
        self._placed: list[list[int]] = []  # [L][n] slots of the running step

    def open(self, sequence: int) -> int:
        """A seat for a sequence (its number is for the events), no slot yet. IndexError when all seats are taken."""
        seat = self._free_seats.pop()
        self._tables[seat] = [_Layer() for _ in range(self.layers)]
        self._sequence[seat] = sequence
        return seat

    def close(self, seat: int) -> None:
        """Give back all that a seat holds."""
        for layer, table in enumerate(self._tables[seat]):
            for owner, slots in (*table.own.items(), (BASE, table.base)):
                for slot in slots:
                    self._release(seat, layer, owner, slot)
        self._tables[seat] = []
        self._free_seats.append(seat)

    def begin(self, seats: Sequence[int]) -> None:
        """Start a step: the seat of each row, rows of a seat in order of position."""
        self._seats = seats
        self._placed.clear()

    def place(self, layer: int, first: Sequence[int]) -> None:
        """Find the place of each row's K/V in a layer and write it to kv_dst.

        first: each row's best expert, BASE in a dense layer.
        Raises SlotsExhausted, which names the seat that found none.
        """
        valid, size = self.slots.valid, self.slots.size
        places: list[int] = []
        used: list[int] = []
        for seat, expert in zip(self._seats, first, strict=True):
            table = self._tables[seat][layer]
            slots = table.own.get(expert) or self._slots_of(table, expert)
            slot = slots[-1] if slots else -1
            at = valid[slot].bit_length() if slots else size
            if at == size:
                slot = self._grow(seat, layer, table, expert)
                at = valid[slot].bit_length()
            valid[slot] |= 1 << at
            places.append(slot * size + at)
            used.append(slot)
        self._placed.append(used)
        if len(places) == 1:
            self._dst[0] = places[0]
        else:
            self._dst[: len(places)] = places

    def _slots_of(self, table: _Layer, expert: int) -> list[int]:
        owner = BASE if expert == BASE else self._rule.owner(table.own.keys(), expert)
        return table.base if owner == BASE else table.own.get(owner, [])

    def _grow(self, seat: int, layer: int, table: _Layer, expert: int) -> int:
        """Another slot for the owner; without a free one, room in any slot of this sequence and layer."""
        owner = BASE if expert == BASE else self._rule.owner(table.own.keys(), expert)
        slot = self.slots.take()
        if slot >= 0:
            (table.base if owner == BASE else table.own.setdefault(owner, [])).append(slot)
            if self.on_slot:
                self.on_slot(clock(), SlotKind.ALLOC, slot, self._sequence[seat], layer, owner)
            return slot
        for slot in table.all():
            if self.slots.valid[slot].bit_length() < self.slots.size:
                return slot
        held = sum(len(t.all()) for t in self._tables[seat])
        raise SlotsExhausted(
            f"no KV slot left: all {self.slots.slots} slots of {self.slots.size} tokens are in use, "
            f"{held} of them by this request; raise kv_cache_max_slots, or run fewer requests at once",
            seat,
        )

    def rewind(self, seat: int, length: int) -> None:
        """Forget all but the first `length` positions of a seat, also those placed by a step that did not end."""
        size = self.slots.size
        for layer, table in enumerate(self._tables[seat]):
            kept = np.bincount(self.pool.where[seat, layer, :length] // size, minlength=self.slots.slots)
            for owner, slots in (*table.own.items(), (BASE, table.base)):
                for slot in [s for s in slots if not kept[s]]:
                    slots.remove(slot)
                    self._release(seat, layer, owner, slot)
                for slot in slots:
                    self.slots.valid[slot] = (1 << int(kept[slot])) - 1
            table.own = {owner: slots for owner, slots in table.own.items() if slots}

    def slots_of_rows(self) -> NDArray[np.int32]:
        """int32 [n, L]: the slot that each row's K/V of the last step went to in each layer."""
        return np.array(self._placed, np.int32).T

    def slots_of_first_row(self) -> list[int]:
        """The same for row 0 alone, per layer."""
        return [used[0] for used in self._placed]

    def table(self, seat: int) -> list[dict[int, list[int]]]:
        """Per layer: owner -> slots, BASE among the owners. A copy, for views and tests."""
        return [{o: list(s) for o, s in (*t.own.items(), (BASE, t.base)) if s} for t in self._tables[seat]]

    def _release(self, seat: int, layer: int, owner: int, slot: int) -> None:
        self.slots.release(slot)
        if self.on_slot:
            self.on_slot(clock(), SlotKind.FREE, slot, self._sequence[seat], layer, owner)

    def counters(self) -> dict[str, int]:
        s = self.slots
        return {"slots": s.slots, "slots_used": s.used, "slots_peak": s.peak, "slot_size": s.size, "tokens": s.tokens()}
