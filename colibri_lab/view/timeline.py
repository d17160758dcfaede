"""What each token cost: one column a sampled token, percentiles, time to first token, tokens/s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np

from colibri_lab.events import PageKind, Phase, SequenceKind
from colibri_lab.trace import Batch
from colibri_lab.view.history import History

DECODE = int(Phase.DECODE)  # NumPy compares with plain integers ten times faster
PREFETCH, WASTE = int(PageKind.PREFETCH), int(PageKind.WASTE)
STAGES = ("experts", "attention", "router", "dispatch", "I/O wait", "head", "other")
NAMED = ("experts_ns", "attention_ns", "router_ns", "dispatch_ns", "io_ns", "head_ns")  # fields of TOKEN, in that order
COLUMN = np.dtype(
    [
        ("t_ns", "u8"),
        ("sequence", "u4"),
        ("position", "u4"),
        ("phase", "u1"),
        ("rows", "u2"),
        ("latency_ns", "u8"),
        ("stages_ns", "u8", (7,)),  # the row's share of each of STAGES
        ("faults", "u2"),
        ("hits", "u2"),
        ("evictions", "u2"),
        ("guessed", "u2"),  # of the hits: experts that were there since a prefetcher guessed them
        ("wasted", "u2"),  # guesses read and thrown away unused since the column before
        ("bytes_read", "u8"),
        ("gap", "u4"),  # rows missed just before this one
    ]
)
COLUMNS, LATENCIES, _SEQUENCES = 2048, 8192, 256
# the same bytes with faults, hits, evictions, guessed and wasted as one array
_BEFORE = sum(
    COLUMN[name].itemsize for name in ("t_ns", "sequence", "position", "phase", "rows", "latency_ns", "stages_ns")
)
COUNTED = np.dtype([("before", f"V{_BEFORE}"), ("count", "u2", (5,)), ("after", f"V{COLUMN.itemsize - _BEFORE - 10}")])
_COLUMN = Struct("=QIIBHQ7Q5HQI").pack
FEW = 64  # rows that are quicker one by one than as arrays


class Latency(NamedTuple):
    """Milliseconds a decoded token, over the newest 8192 of them; n is how many there are."""

    n: int
    p50: float
    p95: float
    p99: float
    longest: float


class Timeline:
    """Prompt rows are told apart: each prefill step is one column, and none of them counts as a decoded token."""

    def __init__(self) -> None:
        self._columns = History(COLUMNS, COLUMN)
        self._decode_ns, self._sampled_ns = History(LATENCIES, "u8"), History(LATENCIES, "u8")
        self._ordered = np.zeros(0, "u8")  # decode_ns in order, as of _latency
        self._start: dict[int, tuple[int, int]] = {}  # sequence: (t_ns, prompt tokens)
        self._first: dict[int, int] = {}  # sequence: t_ns of its first sampled token
        self.finished: dict[int, int] = {}  # sequence: reason
        self._pending_gap = 0
        self._newest: tuple[int, int] | None = None  # the greatest of _start
        self._ttft: float | None = None
        self._guesses = np.zeros((0, 2), "u8")  # (t_ns, kind) later than all columns
        self._latency = Latency(0, 0.0, 0.0, 0.0, 0.0)
        self.missing = self.decoded = self.prompt_rows = self.prompt_ns = 0
        self.faults = self.hits = self.evictions = self.bytes_read = self.last_ns = self.started = 0

    def take(self, batch: Batch) -> None:
        for t, kind, sequence, prompt, detail in batch.sequences.tolist():
            if kind == SequenceKind.START:
                self._start[sequence] = (t, prompt)
                self.started += 1
            else:
                self.finished[sequence] = detail
        lost = batch.missing.get("tokens", 0)
        self.missing += lost
        self._pending_gap += lost
        firsts = len(self._first)
        if len(batch.tokens) > FEW:
            self._take_rows(batch.tokens)
        elif len(batch.tokens):
            self._take_few(batch.tokens.tolist())
        self._take_guesses(batch.pages)
        if len(batch.sequences) or len(self._first) > firsts:
            for known in (self._start, self._first, self.finished):
                for old in sorted(known)[:-_SEQUENCES]:
                    del known[old]
            self._newest = max(self._start.values(), default=None)
            self._ttft = self._first_token_ms()

    def _take_few(self, rows: list[tuple[int, ...]]) -> None:
        """As _take_rows: a row at a time, in whole numbers of Python."""
        latencies, sampled, columns = list[int](), list[int](), list[bytes]()
        for row in rows:
            t, sequence, position, token, phase, of, latency, attention, router, dispatch, io, experts, head, *told = (
                row
            )
            faults, hits, evictions, read = told
            self.faults, self.hits, self.evictions = self.faults + faults, self.hits + hits, self.evictions + evictions
            self.bytes_read, self.last_ns = self.bytes_read + read, max(self.last_ns, t)
            share = latency
            if phase == DECODE:
                latencies.append(latency)
                share //= max(of, 1)
            else:
                self.prompt_rows += 1
                self.prompt_ns += latency
            if token >= 0:
                sampled.append(t)
                self._first[sequence] = min(t, self._first.get(sequence, t))
            if phase == DECODE or token >= 0 or faults or hits:
                known = (experts, attention, router, dispatch, io, head)
                columns.append(_COLUMN(t, sequence, position, phase, of, latency, *known, max(share - sum(known), 0),
                                       faults, hits, evictions, 0, 0, read, self._pending_gap))  # fmt: skip
                self._pending_gap = 0
        self.decoded += len(latencies)
        self._decode_ns.append(np.array(latencies, "u8"))
        self._sampled_ns.append(np.array(sampled, "u8"))
        self._columns.append(np.frombuffer(b"".join(columns), COLUMN))

    def _take_rows(self, rows: np.ndarray) -> None:
        decode = rows["phase"] == DECODE
        self.decoded += int(decode.sum())
        self.prompt_rows += int((~decode).sum())
        self.prompt_ns += int(rows["latency_ns"][~decode].sum())
        for name in ("faults", "hits", "evictions", "bytes_read"):
            setattr(self, name, getattr(self, name) + int(rows[name].sum(dtype="u8")))
        self.last_ns = max(self.last_ns, int(rows["t_ns"].max()))
        self._decode_ns.append(rows["latency_ns"][decode])
        sampled = rows[rows["token"] >= 0]
        self._sampled_ns.append(sampled["t_ns"])
        for sequence, t in zip(sampled["sequence"].tolist(), sampled["t_ns"].tolist(), strict=True):
            self._first[sequence] = min(t, self._first.get(sequence, t))
        shown = np.flatnonzero(decode | (rows["token"] >= 0) | (rows["faults"] > 0) | (rows["hits"] > 0))
        if len(shown):
            self._columns.append(self._make(rows[shown]))

    def _take_guesses(self, pages: np.ndarray) -> None:
        """What became of guesses belongs to the first column that ends later; it may come before or after its event."""
        if len(pages):
            kinds = pages["kind"]
            told = pages[(kinds == PREFETCH) | (kinds == WASTE)]
            self._guesses = np.concatenate([self._guesses, np.stack([told["t_ns"], told["kind"]], axis=1)])
        columns = self.columns
        if not len(self._guesses) or not len(columns):
            return
        at = np.searchsorted(columns["t_ns"], self._guesses[:, 0])
        there = at < len(columns)
        for name, kind in (("guessed", PREFETCH), ("wasted", WASTE)):
            np.add.at(columns[name], at[there & (self._guesses[:, 1] == kind)], 1)
        self._guesses = self._guesses[~there]

    def _make(self, rows: np.ndarray) -> np.ndarray:
        out = np.zeros(len(rows), COLUMN)
        for name in ("t_ns", "sequence", "position", "phase", "rows", "latency_ns", "faults", "hits", "evictions"):
            out[name] = rows[name]
        out["bytes_read"] = rows["bytes_read"]
        out["stages_ns"] = stages(rows)
        out["gap"][0], self._pending_gap = self._pending_gap, 0
        return out

    @property
    def running(self) -> dict[int, tuple[int, int]]:
        """(t_ns of its start, prompt tokens) of each sequence that has not ended."""
        return {sequence: start for sequence, start in self._start.items() if sequence not in self.finished}

    @property
    def sampled(self) -> int:
        """Tokens sampled so far: the number of the next one."""
        return self._sampled_ns.total

    @property
    def columns(self) -> np.ndarray:
        """COLUMN [at most 2048], oldest first."""
        return self._columns.rows

    @property
    def shown(self) -> int:
        """Columns so far, those that are no longer kept with them."""
        return self._columns.total

    @property
    def decode_ms(self) -> np.ndarray:
        """float64 [at most 8192]"""
        return self._decode_ns.rows / 1e6

    def latency(self) -> Latency:
        if self._latency.n != self.decoded:  # a frame asks for it more than once
            self._ordered = np.sort(self._decode_ns.rows)
            p50, p95, p99 = percentiles(self._ordered, (50, 95, 99), 1e6)
            self._latency = Latency(self.decoded, p50, p95, p99, float(self._ordered[-1]) / 1e6)
        return self._latency

    def shares(self) -> dict[str, float]:
        """The part of the columns' time that each of STAGES took; they add up to 1. Empty before there is any time."""
        spent = self.columns["stages_ns"].sum(axis=0).tolist()
        whole = sum(spent)
        return {name: ns / whole for name, ns in zip(STAGES, spent, strict=True)} if whole else {}

    def histogram(self, bins: int = 48) -> tuple[np.ndarray, float]:
        """(counts int64 [bins] from 0 to the returned end in ms, the longer ones in the last bin)."""
        known = self.latency()
        end = _nice(min(known.p99 * 1.3, known.p95 * 2.5)) if known.p99 > 0 and known.p95 > 0 else 1.0
        at = self._ordered.searchsorted(_edges(bins, end))
        return at[1:] - at[:-1], end

    def first_token_ms(self) -> float | None:
        """Time to first token of the newest sequence that has one; None before there is any."""
        return self._ttft

    def _first_token_ms(self) -> float | None:
        known = [s for s in self._first if s in self._start and self._first[s] >= self._start[s][0]]
        if not known:
            return None
        newest = max(known, key=lambda s: (self._start[s][0], s))
        return (self._first[newest] - self._start[newest][0]) / 1e6

    @property
    def prompt_tokens(self) -> int | None:
        """Of the newest sequence."""
        return self._newest and self._newest[1]

    def tokens_per_s(self, seconds: float = 2.0) -> float:
        """Sampled tokens a second over the last `seconds` of the run's own clock, from the newest start on."""
        t = self._sampled_ns.rows  # in order, as the clock runs
        if not len(t):
            return 0.0
        last = int(t[-1])
        since = max(last - int(seconds * 1e9), self._newest[0] if self._newest else 0, 0)
        t = t[t.searchsorted(np.uint64(since)) :]
        span = last - int(t[0]) if len(t) else 0
        return float((len(t) - t.searchsorted(t[0], "right")) / (span / 1e9)) if span > 0 else 0.0

    def hit_rate(self, columns: int | None = None) -> float | None:
        """Expert hits over all expert reads, of the whole run or of the last columns; None where there were none."""
        hits, faults = self.hits, self.faults
        if columns is not None:
            last = self.columns[-columns:].view(COUNTED)["count"]
            faults, hits = last[:, :2].sum(axis=0, dtype="u8").tolist()
        return hits / (hits + faults) if hits + faults else None


def stages(rows: np.ndarray) -> np.ndarray:
    """u8 [n, 7], nanoseconds: the share of each row of TOKEN in each of STAGES."""
    out = np.zeros((len(rows), len(STAGES)), "u8")
    for i, name in enumerate(NAMED):
        out[:, i] = rows[name]
    # a decoded row's latency is its step's: only its share of it is in the row's stages
    decode = rows["phase"] == DECODE
    whole = np.where(decode, rows["latency_ns"] // np.maximum(rows["rows"], 1), rows["latency_ns"])
    known = out[:, :-1].sum(axis=1)
    out[:, -1] = np.where(whole > known, whole - np.minimum(known, whole), 0)
    return out


def percentiles(ordered: np.ndarray, shares: Sequence[float], unit: float = 1) -> list[float]:
    """np.percentile of sorted [n] / unit, n > 0, to the last bit. NumPy sorts faster than it makes partitions, and its
    own percentile spends as much again on checks."""
    out = []
    for share in shares:
        place = share / 100 * (len(ordered) - 1)
        low = int(place)
        a, b = float(ordered[low]) / unit, float(ordered[min(low + 1, len(ordered) - 1)]) / unit
        t = place - low
        out.append(a + (b - a) * t if t < 0.5 else b - (b - a) * (1 - t))
    return out


@lru_cache(4)
def _edges(bins: int, end_ms: float) -> np.ndarray:
    """u8 [bins + 1], nanoseconds: where each bin begins and the last one ends, which is nowhere."""
    edges: np.ndarray = np.ceil(np.arange(bins + 1) * (end_ms * 1e6 / bins)).astype("u8")
    edges[-1] = np.iinfo("u8").max
    return edges


def _nice(value: float) -> float:
    """The least of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten that is not below value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((m * power for m in (1, 1.5, 2, 3, 4, 5, 6, 8) if m * power >= value * 0.9999), 10 * power)
