"""The KV cache of all sequences: a page table per seat and layer over one slot pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SlotsExhausted
from ..events import SlotKind
from ..ops.types import KVPool
from .rule import BASE, ByUse, PlacementRule
from .slots import SlotPool


class _Layer:
    """One sequence's page table in one layer."""

    __slots__ = ("bar", "slots", "uses")

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = {BASE: []}  # owner -> slots, the last of which takes the next token
        self.uses: defaultdict[int, int] = defaultdict(int)  # tokens that an expert ranked first for
        self.bar = 0  # an expert without slots that has no more uses than this overtakes nobody


class KVCache:
    """Seats (one per running sequence) with their page tables.

    on_slot(t_ns, kind, slot, sequence, layer, owner) is told of each slot taken and given back.
    A step in which a sequence finds no slot ends with SlotsExhausted; `rewind` then undoes what it placed.
    """

    def __init__(self, pool: KVPool, slots: SlotPool, layers: int, kv_dst: NDArray[np.int32],
                 rule: PlacementRule | None = None, on_slot: Any = None) -> None:  # fmt: skip
        self.pool, self.slots, self.layers = pool, slots, layers
        self.on_slot = on_slot
        self.on_release: Callable[[int], None] | None = None  # told of each slot before it is free
        self.rule = rule or ByUse()
        self.base_slots = self.double_slots = self.rankings = self.promotions = self.entries_moved = 0
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
            for owner, slots in table.slots.items():
                for slot in slots:
                    self._release(seat, layer, owner, slot)
        self._tables[seat] = []
        self._free_seats.append(seat)

    def begin(self, seats: Sequence[int]) -> None:
        """Start a step: the seat of each row, rows of a seat in order of position."""
        self._seats = seats
        self._placed.clear()

    def place(self, layer: int, first: Sequence[int], at: int = 0) -> list[int]:
        """Find the place of each row's K/V in a layer, also written to kv_dst.

        first: the best expert of each row from `at` on, BASE in a dense layer; a layer's rows come in order.
        Raises SlotsExhausted, which names the seat that found none.
        """
        valid, size = self.slots.valid, self.slots.size
        places: list[int] = []
        used: list[int] = []
        whole = len(first) == len(self._seats)
        for seat, expert in zip(self._seats if whole else self._seats[at : at + len(first)], first, strict=True):
            table = self._tables[seat][layer]
            table.uses[expert] += 1
            slots = table.slots.get(expert)
            if slots is None:
                slots = self._outsider(seat, layer, table, expert)
            slot = slots[-1] if slots else -1
            token = valid[slot].bit_length() if slots else size
            if token == size:
                slot = self._grow(seat, layer, table, expert)
                token = valid[slot].bit_length()
            valid[slot] |= 1 << token
            places.append(slot * size + token)
            used.append(slot)
        if at:
            self._placed[layer] += used
        else:
            self._placed.append(used)
        if len(places) == 1:
            self._dst[at] = places[0]
        else:
            self._dst[at : at + len(places)] = places
        return places

    def _outsider(self, seat: int, layer: int, table: _Layer, expert: int) -> list[int]:
        """The slots of an expert that has none of its own: now it may get some, else the base slots."""
        if len(table.slots) <= self.rule.own:  # BASE is one of them
            return table.slots.setdefault(expert, [])
        if table.uses[expert] > table.bar:
            self._rank(seat, layer, table, expert)
        return table.slots.get(expert, table.slots[BASE])

    def _rank(self, seat: int, layer: int, table: _Layer, expert: int) -> None:
        """Compare with the least used owner; who is overtaken leaves its slots to BASE. Entries move, no token does.

        Owners' uses only rise, so between two calls `bar` may be too low and never too high.
        """
        self.rankings += 1
        weakest = min((o for o in table.slots if o != BASE), key=table.uses.__getitem__)
        table.bar = self.rule.bar(table.uses[weakest])
        if table.uses[expert] <= table.bar:
            return
        moved = table.slots.pop(weakest)
        table.slots[BASE][:0] = moved
        table.slots[expert] = []
        self.promotions += 1
        self.entries_moved += len(moved)
        self.base_slots += len(moved)
        for slot in moved if self.on_slot else ():
            self.on_slot(clock(), SlotKind.FREE, slot, self._sequence[seat], layer, weakest)
            self.on_slot(clock(), SlotKind.ALLOC, slot, self._sequence[seat], layer, BASE)

    def _grow(self, seat: int, layer: int, table: _Layer, expert: int) -> int:
        """A slot with room for the owner, now its last; without a free one, room in any slot of this layer."""
        owner = expert if expert in table.slots else BASE
        slots = table.slots[owner]
        slot = self._room(slots)
        if slot >= 0:
            slots.remove(slot)
        elif (slot := self.slots.take()) >= 0:
            kind = SlotKind.ALLOC
            if slots and owner != BASE and self._second(table, owner):
                kind = SlotKind.PAIR
                self._own(seat, layer, owner, slots, self.slots.take(), kind)
                self.double_slots += 1
            self._own(seat, layer, owner, slots, slot, kind)
            return slot
        else:
            return self._any_room(seat, table)
        slots.append(slot)
        return slot

    def _second(self, table: _Layer, owner: int) -> bool:
        """Whether an owner takes two slots at once: it is used much, and a quarter of the pool is there for others."""
        mine = table.uses[owner], -owner
        rank = sum((uses, -other) > mine for other, uses in table.uses.items() if other in table.slots)
        return self.rule.doubles(rank) and self.slots.free > self.slots.slots // 4

    def _own(self, seat: int, layer: int, owner: int, slots: list[int], slot: int, kind: int) -> None:
        slots.append(slot)
        self.base_slots += owner == BASE
        if self.on_slot:
            self.on_slot(clock(), kind, slot, self._sequence[seat], layer, owner)

    def _room(self, slots: list[int]) -> int:
        """One of these slots that is not full, or -1: a spare one, or one that an overtaken expert left."""
        return next((slot for slot in slots if self.slots.valid[slot].bit_length() < self.slots.size), -1)

    def _any_room(self, seat: int, table: _Layer) -> int:
        for slots in table.slots.values():
            if (slot := self._room(slots)) >= 0:
                return slot
        held = sum(len(slots) for t in self._tables[seat] for slots in t.slots.values())
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
            for owner, slots in table.slots.items():
                for slot in [s for s in slots if not kept[s]]:
                    slots.remove(slot)
                    self._release(seat, layer, owner, slot)
                for slot in slots:
                    self.slots.valid[slot] = (1 << int(kept[slot])) - 1
            table.slots = {owner: slots for owner, slots in table.slots.items() if slots or owner == BASE}
            experts, uses = np.unique(self.pool.first[seat, layer, :length], return_counts=True)
            table.uses = defaultdict(int, zip(experts.tolist(), uses.tolist(), strict=True))
            table.bar = 0

    def slots_of_rows(self) -> NDArray[np.int32]:
        """int32 [n, L]: the slot that each row's K/V of the last step went to in each layer."""
        return np.array(self._placed, np.int32).T

    def slots_of_first_row(self) -> list[int]:
        """The same for row 0 alone, per layer."""
        return [used[0] for used in self._placed]

    def table(self, seat: int) -> list[dict[int, list[int]]]:
        """Per layer: owner -> slots, BASE among the owners. A copy, for views and tests."""
        return [{owner: list(slots) for owner, slots in t.slots.items() if slots} for t in self._tables[seat]]

    def take(self, seat: int, layer: int, owner: int) -> int:
        """A slot for an owner, which the caller fills; -1 when there is none. `rewind` then counts what is in it."""
        slot = self.slots.take()
        if slot >= 0:
            slots = self._tables[seat][layer].slots.setdefault(owner, [])
            self._own(seat, layer, owner, slots, slot, SlotKind.ALLOC)
        return slot

    def _release(self, seat: int, layer: int, owner: int, slot: int) -> None:
        if self.on_release:
            self.on_release(slot)
        self.slots.release(slot)
        self.base_slots -= owner == BASE
        if self.on_slot:
            self.on_slot(clock(), SlotKind.FREE, slot, self._sequence[seat], layer, owner)

    def counters(self) -> dict[str, int]:
        """Slots and tokens now, changes of the ranking so far, and what attention read: a token in each layer is one.

        Bytes are those of keys and values. `attention_guessed` rows chose tokens by their guessed experts, and
        `attention_recalled` of them then had a guessed expert rank first.
        """
        s, each = self.slots, 2 * self.pool.k[0].nbytes
        read, exact, guessed, recalled = self.pool.seen.sum(axis=0).tolist()
        return {
            "slots": s.slots, "slots_used": s.used, "slots_peak": s.peak, "slot_size": s.size, "tokens": s.tokens(),
            "base_slots": self.base_slots, "double_slots": self.double_slots,
            "rankings": self.rankings, "promotions": self.promotions, "entries_moved": self.entries_moved,
            "attention_tokens": read, "attention_tokens_exact": exact,
            "attention_bytes": read * each, "attention_bytes_exact": exact * each,
            "attention_guessed": guessed, "attention_recalled": recalled,
        }  # fmt: skip
