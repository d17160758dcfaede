"""A run's figures while it goes, and the record that is kept of it: a fold over Batches like the other views.

A run begins when a sequence starts while no other runs, or when the lab starts one; it holds all sequences since.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colibri_lab.events import Phase, SequenceKind
from colibri_lab.trace import Batch
from colibri_lab.view.gauges import Gauges
from colibri_lab.view.history import History, twin

SEQUENCES, ROWS, PIECES, CHANGES = 256, 8192, 4096, 512  # most that is kept of each
_ROW = np.dtype([("sequence", "u4"), ("latency_ns", "u8")])
_SUMS = ("hits", "faults", "evictions", "bytes_read", "io_ns")
PREFILL, DECODE = int(Phase.PREFILL), int(Phase.DECODE)
LATER = 256  # rows that wait to be taken
KINDS = ("policy_hits", "pin_hits", "prefetch_hits")
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What is kept of a run. Times in milliseconds, sizes in bytes, rates of 1; None: not known or nothing to measure.

    settings: those that differed from their defaults, as in force at its end; changed: keys written while it ran.
    text: of its last sequence, the first 4096 pieces; digest: of all its token ids, sequence by sequence.
    """

    name: str
    model: str
    settings: Values
    changed: tuple[str, ...]
    prompt: str
    sampling: Values
    sequences: int
    prompt_tokens: int
    tokens: int
    tokens_per_s: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    ttft_ms: float | None
    prompt_tokens_per_s: float | None
    hit_rate: float | None
    policy_hit_rate: float | None
    pin_hit_rate: float | None
    prefetch_hit_rate: float | None
    faults: int
    evictions: int
    bytes_read: int
    io_wait_ms: float
    budget_bytes: int | None
    missed: int
    digest: str
    text: str = field(repr=False)


@dataclass
class _Track:
    """Of one sequence; nothing here depends on how its events were batched."""

    start_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    sampled: int = 0
    prompt_rows: int = 0
    prompt_ns: int = 0
    ids: Any = field(default_factory=hashlib.sha256)
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0))
    pieces: dict[int, str] = field(default_factory=dict)

    def take(self, rows: np.ndarray) -> None:
        prompt = rows["latency_ns"][rows["phase"] == PREFILL].tolist()
        self.prompt_rows += len(prompt)
        self.prompt_ns += sum(prompt)
        for name in _SUMS:
            self.sums[name] += sum(rows[name].tolist())
        sampled = rows[rows["token"] >= 0]
        if len(sampled):
            self.first_ns = self.first_ns or int(sampled["t_ns"][0])
            self.last_ns = int(sampled["t_ns"][-1])
            self.sampled += len(sampled)
            self.ids.update(sampled["token"].astype("<i4").tobytes())

    def copy(self) -> _Track:
        out = twin(self)
        out.ids = self.ids.copy()
        return out


class Meter:
    """Follows the newest run; `keep` freezes it."""

    def __init__(self) -> None:
        self._tracks: dict[int, _Track] = {}
        self._running: set[int] = set()
        self._rows = History(ROWS, _ROW)
        self._waiting: list[np.ndarray] = []  # TOKEN rows that are not taken yet
        self._rows_waiting = 0
        self._asked: dict[int, Values] = {}  # by sequence, what the lab noted when it started it
        self._changes: list[tuple[int, int, Values]] = []  # settings by time
        self._base: np.ndarray | None = None  # the gauges when the run began
        self._whole = True  # no sample went missing, so that an engine without one before had counted nothing
        self.first = 0  # the first sequence of the run
        self.missing = 0

    def take(self, batch: Batch, gauges: Gauges) -> None:
        self.missing += batch.missing.get("tokens", 0)
        self._whole &= not batch.missing.get("gauges", 0)
        before = self.first
        for key, value, t in batch.notes:
            self._note(key, value, t)
        if batch.missing.get("sequences"):
            self._running.clear()
        for t, kind, sequence, _, _ in batch.sequences.tolist():
            if kind == SequenceKind.START:
                self._track(sequence).start_ns = t
                if not self._running:
                    self.first = max(self.first, sequence)
                self._running.add(sequence)
            else:
                self._running.discard(sequence)
        if len(batch.tokens):
            self._waiting.append(batch.tokens)
            self._rows_waiting += len(batch.tokens)
        if len(batch.sequences) or self.first != before or self._rows_waiting > LATER:
            self._count()
        for sequence, position, piece in batch.texts:
            pieces = self._track(sequence).pieces
            if len(pieces) < PIECES:
                pieces[position] = piece
        for known in (self._tracks, self._asked):
            if self.first != before or len(known) > SEQUENCES:
                for old in [s for s in known if s < self.first] + sorted(known)[:-SEQUENCES]:
                    known.pop(old, None)
        if self.first != before:
            self._base = None
        start = self._tracks[self.first].start_ns if self.first in self._tracks else 0
        early = len(batch.gauges) and batch.gauges["t_ns"][0] <= start
        if start and (self.first != before or len(batch.sequences) or early):
            self._begin(start, gauges)

    def _count(self) -> None:
        """Takes the rows that wait: they are looked at when a run is kept, not with each picture."""
        if not self._waiting:
            return
        rows = np.concatenate(self._waiting)
        self._waiting, self._rows_waiting = [], 0
        decode = rows[rows["phase"] == DECODE]
        latencies = np.zeros(len(decode), _ROW)
        latencies["sequence"], latencies["latency_ns"] = decode["sequence"], decode["latency_ns"]
        self._rows.append(latencies)
        for sequence in set(rows["sequence"].tolist()):
            self._track(sequence).take(rows[rows["sequence"] == sequence])

    def copy(self) -> Meter:
        self._count()
        out = twin(self)
        out._tracks = {sequence: track.copy() for sequence, track in self._tracks.items()}
        return out

    def _note(self, key: str, value: Any, t: int) -> None:
        if not isinstance(value, dict):
            return
        if key == "settings":
            insort(self._changes, (t, len(self._changes), value), key=lambda change: change[0])
            while len(self._changes) > CHANGES:  # the two oldest become one
                (_, _, older), (at, n, newer) = self._changes[:2]
                self._changes[:2] = [(at, n, {**older, **newer})]
        elif key == "prompt" and isinstance(value.get("sequence"), int):
            self._asked[value["sequence"]] = value
            self.first = max(self.first, value["sequence"])

    def _track(self, sequence: int) -> _Track:
        if sequence not in self._tracks:
            self._tracks[sequence] = _Track()
        return self._tracks[sequence]

    def _begin(self, start: int, gauges: Gauges) -> None:
        """The newest sample from before the run; samples may come before or after the run's start does."""
        at = int(np.searchsorted(gauges.t_ns, start, "right")) - 1
        if at >= 0:
            self._base = gauges.values[at].copy()

    def keep(self, name: str, gauges: Gauges, about: Values) -> Run:
        """The run as it is now. ValueError where nothing ran yet."""
        self._count()
        tracks = [self._tracks[s] for s in sorted(self._tracks) if s >= self.first]
        sampled = sum(track.sampled for track in tracks)
        if not sampled:
            raise ValueError("nothing to keep: no token was generated yet")
        sums = {name: sum(track.sums[name] for track in tracks) for name in _SUMS}
        first = min(track.first_ns for track in tracks if track.sampled)
        last = max(track.last_ns for track in tracks)
        began = min(track.start_ns for track in tracks)
        decode = self._rows.rows
        ms = decode["latency_ns"][decode["sequence"] >= self.first] / 1e6
        p50, p95, p99 = np.percentile(ms, (50, 95, 99)).tolist() if len(ms) else (None, None, None)
        prompt_ns = sum(track.prompt_ns for track in tracks)
        prompt_rows = sum(track.prompt_rows for track in tracks)
        asked = self._asked.get(self.first) or {}
        settings, changed = self._in_force(began, last, about)
        budget = settings.get("expert_cache_bytes") or about.get("expert_cache_bytes")
        digest = hashlib.sha256(b"".join(track.ids.digest() for track in tracks)).hexdigest()
        pieces = tracks[-1].pieces
        asked_for = sums["hits"] + sums["faults"]
        kinds = self._kinds(gauges)
        return Run(
            name=name,
            model=str(about.get("model") or "a run"),
            settings=settings,
            changed=changed,
            prompt=str(asked.get("text", "")),
            sampling=asked["sampling"] if isinstance(asked.get("sampling"), dict) else {},
            sequences=len(tracks),
            prompt_tokens=prompt_rows,
            tokens=sampled,
            tokens_per_s=(sampled - 1) / ((last - first) / 1e9) if last > first else None,
            p50_ms=p50,
            p95_ms=p95,
            p99_ms=p99,
            ttft_ms=(first - began) / 1e6 if 0 < began <= first else None,
            prompt_tokens_per_s=prompt_rows / (prompt_ns / 1e9) if prompt_ns else None,
            hit_rate=sums["hits"] / asked_for if asked_for else None,
            policy_hit_rate=kinds[0],
            pin_hit_rate=kinds[1],
            prefetch_hit_rate=kinds[2],
            faults=sums["faults"],
            evictions=sums["evictions"],
            bytes_read=sums["bytes_read"],
            io_wait_ms=sums["io_ns"] / 1e6,
            budget_bytes=budget if isinstance(budget, int) else None,
            missed=self.missing,
            digest=digest,
            text="".join(pieces[position] for position in sorted(pieces)),
        )

    def _in_force(self, began: int, last: int, about: Values) -> tuple[dict[str, Any], tuple[str, ...]]:
        given = about.get("settings_given")
        settings = dict(given) if isinstance(given, dict) else {}
        for t, _, values in self._changes:
            settings |= values if t <= last else {}
        changed = sorted({name for t, _, values in self._changes if began < t <= last for name in values})
        return {name: value for name, value in sorted(settings.items()) if value is not None}, tuple(changed)

    def _kinds(self, gauges: Gauges) -> list[float | None]:
        """Share of each of KINDS in what was asked for, by the counters' growth since the run began."""
        names = [f"pager.{name}" for name in (*KINDS, "hits", "faults")]
        known = self._base is not None or (self._whole and gauges.total == len(gauges))
        if not len(gauges) or not known or any(name not in gauges for name in names):
            return [None] * len(KINDS)
        at = [gauges.column[name] for name in names]
        base = np.zeros(len(at)) if self._base is None else np.nan_to_num(self._base[at])
        grown = (gauges.values[-1, at] - base).tolist()
        asked = grown[-2] + grown[-1]
        return [grown[i] / asked if asked > 0 else None for i in range(len(KINDS))]
