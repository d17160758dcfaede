"""Rings: what is written is read, once and in order; what was overwritten is counted, never made up."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.events import PageKind, Phase, SequenceKind, SlotKind
from colibri_lab.telemetry import NullTelemetry, Telemetry

L, K = 3, 2


def step(telemetry, n, first=0, phase=Phase.DECODE, latency=900):
    rows = np.arange(first, first + n)
    route = np.repeat(rows[:, None, None] % 7, L, 1).repeat(K, 2).astype("u2")
    slot = np.repeat(rows[:, None], L, 1).astype("i4")
    stages, counts = (300, 15, 21, 60, 240, 30), (3, 4, 2, 4096)
    telemetry.step(1000 + first, rows, rows, rows, phase, latency, *stages, *counts, route, route / 8, slot)


def test_a_step_of_one_row():
    telemetry = Telemetry(L, 8, K, 8)
    cursor = telemetry.cursor()
    step(telemetry, 1, first=5)
    row = telemetry.read(cursor).tokens[0]
    assert dict(zip(row.dtype.names, row.tolist(), strict=True)) == {
        "t_ns": 1005, "sequence": 5, "position": 5, "token": 5, "phase": 1, "rows": 1, "latency_ns": 900,
        "attention_ns": 300, "router_ns": 15, "dispatch_ns": 21, "io_ns": 60, "experts_ns": 240, "head_ns": 30,
        "faults": 3, "hits": 4, "evictions": 2, "bytes_read": 4096,
    }  # fmt: skip


@pytest.mark.parametrize(("phase", "latency"), [(Phase.DECODE, 900), (Phase.PREFILL, 300), (np.array([1, 0, 1]), None)])
def test_a_step_of_several_rows_is_shared_out(phase, latency):
    telemetry = Telemetry(L, 8, K, 8)
    cursor = telemetry.cursor()
    step(telemetry, 3, phase=phase)
    rows = telemetry.read(cursor).tokens
    assert rows["rows"].tolist() == [3, 3, 3]
    assert rows["attention_ns"].tolist() == [100, 100, 100]
    assert rows["router_ns"].tolist() == [5, 5, 5] and rows["dispatch_ns"].tolist() == [7, 7, 7]
    assert rows["faults"].tolist() == [0, 0, 3], "the whole step's counts stand on its last row"
    assert rows["hits"].tolist() == [0, 0, 4]
    assert rows["bytes_read"].tolist() == [0, 0, 4096]
    assert rows["latency_ns"].tolist() == ([900, 300, 900] if latency is None else [latency] * 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(0, 5))
def test_every_row_is_read_once_or_counted_as_missed(sizes, read_every):
    telemetry = Telemetry(L, 8, K, 8)
    cursor, got, missed, written = telemetry.cursor(), [], 0, 0
    for i, n in enumerate(sizes):
        step(telemetry, n, written)
        written += n
        if read_every and i % read_every == 0:
            batch = telemetry.read(cursor)
            missed += batch.dropped
            got += batch.tokens["sequence"].tolist()
    batch = telemetry.read(cursor)
    missed += batch.dropped
    got += batch.tokens["sequence"].tolist()
    assert len(got) + missed == written
    assert got == sorted(set(got))
    assert got[-8:] == list(range(written))[-min(8, len(got)) :]
    assert batch.route.shape[1:] == (L, K)
    assert (batch.slot[:, 0] == batch.tokens["sequence"]).all()
    assert telemetry.counters()["dropped"] == missed


def test_a_row_overwritten_while_it_is_copied_is_missed_not_torn():
    telemetry = Telemetry(L, 8, K, 8)
    cursor = telemetry.cursor()
    for i in range(8):
        step(telemetry, 1, i)
    telemetry._tokens.claimed += 3  # the writer is in the middle of three more rows
    batch = telemetry.read(cursor)
    assert batch.tokens["sequence"].tolist() == [3, 4, 5, 6, 7]
    assert batch.missing == {"tokens": 3}


def test_rare_events_and_notes():
    telemetry = Telemetry(L, 8, K)
    cursor = telemetry.cursor()
    telemetry.page(1, PageKind.FAULT, 2, 3, 1, 1 << 40, 9)
    telemetry.slot(2, SlotKind.ALLOC, 4, 1, 0, -1)
    telemetry.sequence(3, SequenceKind.START, 1, 7)
    telemetry.text(1, 8, " mots é")
    telemetry.note("settings", {"pace": 40}, 7)
    batch = telemetry.read(cursor)
    assert batch.pages.tolist() == [(1, 0, 2, 3, 1, (1 << 32) - 1, 9)]
    assert batch.slots["owner"].tolist() == [-1]
    assert batch.sequences.tolist() == [(3, 0, 1, 7, 0)]
    assert batch.texts == [(1, 8, " mots é")]
    assert batch.notes == [("settings", {"pace": 40}, 7)]
    assert telemetry.facts == {"settings": {"pace": 40}}
    assert len(telemetry.read(cursor)) == 0
    assert "5 events" in telemetry._repr_html_()


def test_gauges_are_flat_and_names_are_only_added():
    telemetry = Telemetry(L, 8, K)
    cursor = telemetry.cursor()
    telemetry.gauges(1, {"pager": {"faults": 3, "by": {"slow": 0.5}}, "word": "no number"})
    telemetry.gauges(2, {"kv": {"used": 2}, "pager": {"faults": 4}})
    batch = telemetry.read(cursor)
    assert batch.names == ("pager.faults", "pager.by.slow", "kv.used")
    assert batch.gauges["t_ns"].tolist() == [1, 2]
    np.testing.assert_array_equal(batch.gauges["value"][:, :3], [[3, 0.5, np.nan], [4, np.nan, 2]])
    assert np.isnan(batch.gauges["value"][:, 3:]).all()
    telemetry.gauges(3, {str(i): i for i in range(200)})
    assert len(telemetry.read(cursor).names) == 192
    assert telemetry.facts["gauges_left_out"] == [str(i) for i in range(189, 200)]


def test_null_telemetry_keeps_nothing_but_facts():
    telemetry = NullTelemetry(L, 8, K)
    step(telemetry, 4)
    telemetry.page(1, 0, 0, 0, 1, 0, 0)
    telemetry.note("model", {"experts": 8})
    assert len(telemetry.read(telemetry.cursor())) == 0
    assert telemetry.counters() == {"events": 0, "dropped": 0}
    assert telemetry.facts == {"model": {"experts": 8}}
    assert not telemetry.enabled


def test_a_reader_beside_the_writer_sees_whole_rows_in_order():
    telemetry, stop, wrong = Telemetry(L, 8, K, 64), threading.Event(), []
    counts = {"read": 0, "missed": 0}

    def look():
        cursor, last, more = telemetry.cursor(), -1, True
        while more or not stop.is_set():
            batch = telemetry.read(cursor)
            more = len(batch) > 0
            rows = batch.tokens["sequence"].tolist()
            counts["read"] += len(rows)
            counts["missed"] += batch.dropped
            for i, row in enumerate(rows):
                if row <= last or batch.slot[i].tolist() != [row] * L or batch.route[i, 0, 0] != row % 7:
                    wrong.append(row)
                last = row

    reader = threading.Thread(target=look)
    reader.start()
    for i in range(4000):
        step(telemetry, 1 + i % 3, i * 3)
    time.sleep(0.05)
    stop.set()
    reader.join(10)
    assert not wrong
    assert counts["read"] + counts["missed"] == telemetry.counters()["events"]


def test_a_decode_step_costs_little():
    layers, k = 8, 2
    telemetry = Telemetry(layers, 16, k)
    one, route, slot = np.ones(1, "u4"), np.zeros((1, layers, k), "u2"), np.zeros((1, layers), "i4")
    weight, best = np.zeros((1, layers, k), "f4"), 1e9
    for _ in range(5):
        begin = time.perf_counter()
        for i in range(500):
            telemetry.step(i, one, one, one, 1, 900, 300, 15, 21, 60, 240, 30, 3, 4, 2, 4096, route, weight, slot)
            telemetry.text(1, i, "a")
        best = min(best, (time.perf_counter() - begin) / 500)
    assert best < 20e-6  # about 3 us on an idle machine
