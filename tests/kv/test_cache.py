"""The KV cache without a model: every token has its own place, nothing leaks, running out hits one request only."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import ConfigError, SlotsExhausted
from colibri_lab.events import SlotKind
from colibri_lab.kv.cache import KVCache
from colibri_lab.kv.rule import BASE, ByUse
from colibri_lab.kv.slots import SlotPool, allocate

ROWS = 8


def make(slots: int = 64, size: int = 4, layers: int = 2, seats: int = 3, positions: int = 64, **more: Any) -> KVCache:
    pool = allocate(slots, size, ROWS, 1, 2, "fp16", seats, layers, positions)
    return KVCache(pool, SlotPool(slots, size), layers, np.zeros(ROWS, np.int32), **more)


def step(kv: KVCache, rows: list[tuple[int, int]], experts: list[list[int]]) -> None:
    """What the engine and the kernels do to the cache for rows of (seat, position); experts [layer][row]."""
    kv.begin([seat for seat, _ in rows])
    for layer, first in enumerate(experts):
        kv.place(layer, first)
        for row, (seat, position) in enumerate(rows):
            kv.pool.where[seat, layer, position] = kv._dst[row]
            kv.pool.first[seat, layer, position] = first[row]


def test_memory_is_lazy() -> None:
    import psutil

    before = psutil.Process().memory_info().rss
    pool = allocate(2048, 256, 72, 8, 128, "fp16", 9, 48, 32768)  # 2 x 1 GiB of tokens
    assert pool.k.shape == (2048 * 256 + 72, 8, 128) and pool.k.dtype == np.float16 and pool.staging == 2048 * 256
    pool.k[5] = 1
    assert psutil.Process().memory_info().rss - before < 8 << 20


def test_first_ten_experts_own_slots_and_the_rest_share() -> None:
    kv = make(layers=1, size=2)
    seat = kv.open(1)
    for position, expert in enumerate([*range(12), 3, 3, 11, 0, BASE]):
        step(kv, [(seat, position)], [[expert]])
    table = kv.table(seat)[0]
    assert set(table) == {*range(10), BASE}
    assert len(table[3]) == 3 and len(table[BASE]) == 2 and len(table[0]) == 1
    assert [kv.slots.valid[slot] for slot in table[3]] == [0b11, 0, 0b1]  # full, spare, and the one being filled
    counted = {"slots": 64, "slots_used": 14, "slots_peak": 14, "slot_size": 2, "tokens": 17, "base_slots": 2}
    assert counted.items() <= kv.counters().items()
    kv.close(seat)
    assert all(kv.counters()[name] == 0 for name in ("slots_used", "tokens", "base_slots"))


def test_the_three_most_used_grow_by_two_slots() -> None:
    """Once its first slot is full; the spare slot is filled before another is taken."""
    kv = make(layers=1, size=2)
    seat = kv.open(1)
    for position, expert in enumerate([0, 1, 2, 3] * 2 + [0, 1, 2, 3]):
        step(kv, [(seat, position)], [[expert]])
    owned = kv.table(seat)[0]
    assert [len(owned[e]) for e in range(4)] == [3, 3, 3, 2] and kv.counters()["double_slots"] == 3
    for position in range(12, 15):
        step(kv, [(seat, position)], [[0]])  # fills what it has: 3 slots, 6 tokens
    assert len(kv.table(seat)[0][0]) == 3 and kv.counters()["slots_used"] == 11
    step(kv, [(seat, 15)], [[0]])
    assert len(kv.table(seat)[0][0]) == 5


def test_no_spare_slots_from_a_pool_that_gets_empty() -> None:
    kv = make(slots=8, layers=1, size=1)
    seat = kv.open(1)
    for position in range(8):
        step(kv, [(seat, position)], [[0]])
    assert kv.slots.used == 8 and kv.counters()["tokens"] == 8
    assert 0 < kv.counters()["double_slots"] <= 3  # none once less than a quarter is free


def test_who_is_overtaken_leaves_its_slots_to_base_and_no_token_moves() -> None:
    events: list[tuple] = []
    kv = make(layers=1, size=4, rule=ByUse(own=2), on_slot=lambda *event: events.append(event[1:]))
    seat = kv.open(9)
    history = [0] * 6 + [1] * 5 + [2] * 21  # expert 2 needs 5 + 16 uses to be even with the bar
    for position, expert in enumerate(history):
        step(kv, [(seat, position)], [[expert]])
    before, table = kv.pool.where[seat, 0, : len(history)].copy(), kv.table(seat)[0]
    assert set(table) == {0, 1, BASE} and kv.counters()["promotions"] == 0
    step(kv, [(seat, len(history))], [[2]])
    after = kv.table(seat)[0]
    assert set(after) == {0, 2, BASE} and set(after[BASE]) == set(table[1] + table[BASE])
    assert (kv.pool.where[seat, 0, : len(history)] == before).all()
    assert kv.counters()["promotions"] == 1 and kv.counters()["entries_moved"] == len(table[1])
    assert kv.counters()["base_slots"] == len(after[BASE])
    moves = [event for event in events if event[1] in table[1]][-2 * len(table[1]) :]
    told = [(kind, owner) for kind, _, _, _, owner in moves]
    assert told == [(SlotKind.FREE, 1), (SlotKind.ALLOC, BASE)] * len(table[1])
    room = [slot for slot in after[BASE] if kv.slots.valid[slot].bit_length() < 4]
    for position in range(len(history) + 1, len(history) + 4):  # expert 1 fills what lies in base before it takes more
        step(kv, [(seat, position)], [[1]])
    assert room and set(kv.table(seat)[0][BASE]) == set(after[BASE])


def test_equal_experts_do_not_change_places_at_every_token() -> None:
    kv = make(layers=1, size=4, slots=400, positions=1200, rule=ByUse(own=1))
    seat = kv.open(1)
    for position in range(1200):
        step(kv, [(seat, position)], [[position % 2]])
    assert kv.counters()["promotions"] == 0 < kv.counters()["rankings"] < 30


def test_a_rewind_forgets_uses_too() -> None:
    kv = make(layers=1, size=4, rule=ByUse(own=1))
    seat = kv.open(1)
    for _ in range(30):  # the same step again and again, as after errors: it counts once
        step(kv, [(seat, 0), (seat, 1)], [[0, 5]])
        kv.rewind(seat, 1)
    assert kv.counters()["promotions"] == 0 and kv._tables[seat][0].uses == {0: 1}


def test_a_rule_can_be_put_in_its_place() -> None:
    kv = make(layers=1, rule=ByUse(own=1))
    seat = kv.open(1)
    step(kv, [(seat, 0), (seat, 1), (seat, 2)], [[5, 6, 5]])
    assert {owner: len(slots) for owner, slots in kv.table(seat)[0].items()} == {5: 1, BASE: 1}


def test_events_tell_slots_taken_and_given_back() -> None:
    events: list[tuple] = []
    kv = make(layers=2, on_slot=lambda *event: events.append(event[1:]))
    seat = kv.open(9)
    step(kv, [(seat, 0)], [[3], [BASE]])
    kv.close(seat)
    assert events == [
        (SlotKind.ALLOC, 0, 9, 0, 3),
        (SlotKind.ALLOC, 1, 9, 1, BASE),
        (SlotKind.FREE, 0, 9, 0, 3),
        (SlotKind.FREE, 1, 9, 1, BASE),
    ]


class Eager(ByUse):
    """Overtakes without a margin."""

    def bar(self, weakest: int) -> int:
        return weakest


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 6), st.integers(2, 40), st.sampled_from([ByUse(), Eager(1), Eager(3)]), st.data())
def test_any_history(size: int, slots: int, rule: ByUse, data: st.DataObject) -> None:
    """Random requests, chunks, cancels, half-done steps, full pools: places distinct, bitmaps right, all comes back."""
    kv = make(slots=slots, size=size, rule=rule)
    length: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "close", "step", "step", "step", "abort"]))
        if action == "open" and len(length) < 3:
            length[kv.open(1)] = 0
        elif action == "close" and length:
            seat = data.draw(st.sampled_from(sorted(length)))
            kv.close(seat)
            del length[seat]
        elif action in ("step", "abort") and length:
            rows = []
            for seat in sorted(length):
                count = min(data.draw(st.integers(0, 3)), 64 - length[seat], ROWS - len(rows))
                rows += [(seat, length[seat] + i) for i in range(count)]
            experts = [
                data.draw(st.lists(st.integers(-1, 12), min_size=len(rows), max_size=len(rows))) for _ in range(2)
            ]
            try:
                step(kv, rows, experts if action == "step" else experts[: data.draw(st.integers(0, 2))])
            except SlotsExhausted as error:
                assert (
                    kv.slots.used == slots and f"all {slots} slots" in str(error) and "kv_cache_max_slots" in str(error)
                )
                kv.close(error.seat)
                del length[error.seat]
                action = "abort"
            for seat in length:
                if action == "abort":
                    kv.rewind(seat, length[seat])
                else:
                    length[seat] += sum(row == seat for row, _ in rows)
            if action == "step" and rows:
                stored = np.array([kv.pool.where[seat, :, position] for seat, position in rows])
                assert (kv.slots_of_rows() == stored // size).all()
        places = [kv.pool.where[seat, :, : length[seat]] for seat in length]
        flat = np.concatenate([p.ravel() for p in places]) if places else np.zeros(0, int)
        assert len(set(flat.tolist())) == len(flat) and (flat < slots * size).all()
        counted = np.bincount(flat // size, minlength=slots)
        assert [bits.bit_count() for bits in kv.slots.valid] == counted.tolist()
        tables = [layer for seat in length for layer in kv.table(seat)]
        held = [slot for layer in tables for owned in layer.values() for slot in owned]
        assert kv.counters()["base_slots"] == sum(len(layer.get(BASE, ())) for layer in tables)
        assert all(len(set(layer) - {BASE}) <= rule.own for layer in tables)
        for seat in length:
            for layer, table in enumerate(kv._tables[seat]):
                first = kv.pool.first[seat, layer, : length[seat]]
                uses = {expert: count for expert, count in table.uses.items() if count}
                assert uses == {expert: int((first == expert).sum()) for expert in set(first.tolist())}
        assert len(held) == len(set(held)) == kv.slots.used and set(np.flatnonzero(counted)) <= set(held)
    for seat in length:
        kv.close(seat)
    assert kv.slots.used == 0 and sorted(kv.slots._free) == list(range(slots))


def test_the_last_room_of_a_request_is_used_before_it_fails() -> None:
    kv = make(slots=2, size=2, layers=1)
    seat = kv.open(1)
    step(kv, [(seat, 0), (seat, 1)], [[0, 1]])  # one slot each, both half full
    step(kv, [(seat, 2), (seat, 3)], [[2, 2]])  # no slot for expert 2: its tokens lie in the others' slots
    with pytest.raises(SlotsExhausted, match="all 2 slots of 2 tokens are in use, 2 of them by this request"):
        step(kv, [(seat, 4)], [[0]])
    kv.rewind(seat, 4)
    assert kv.counters()["tokens"] == 4


def test_one_request_without_room_leaves_the_other_alone() -> None:
    kv = make(slots=3, size=1, layers=1)
    a, b = kv.open(1), kv.open(2)
    step(kv, [(a, 0), (b, 0)], [[0, 0]])
    with pytest.raises(SlotsExhausted) as error:
        step(kv, [(a, 1), (b, 1)], [[0, 0]])
    assert error.value.seat == b
    kv.close(b)
    kv.rewind(a, 1)
    step(kv, [(a, 1)], [[0]])
    assert kv.counters()["tokens"] == 2


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_arrays(dtype: str) -> None:
    pool = allocate(4, 8, 3, 2, 16, dtype, 2, 5, 10)
    assert pool.k.shape == pool.v.shape == (35, 2, 16) and pool.where.shape == (2, 5, 10)
    assert all(
        a.flags.c_contiguous and a.flags.writeable and a.ctypes.data % 64 == 0 for a in (pool.k, pool.v, pool.where)
    )


def test_a_pool_past_what_tables_can_say_or_memory_can_hold_names_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"1024 slots of 2097152 tokens \(kv_cache_slot_size\) are more than"):
        allocate(1024, 1 << 21, 3, 1, 1, "fp16", 1, 1, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("colibri_lab.kv.slots.zeros", full)
    with pytest.raises(ConfigError, match=r"kv_cache_max_slots: .* need 1\.0 GiB of address space: Cannot allocate"):
        allocate(1024, 1 << 10, 0, 2, 64, "fp32", 1, 1, 1)
