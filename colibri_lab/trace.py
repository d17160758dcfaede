"""A run's events as arrays: one Batch from any source, written to trace.jsonl and read back.

Each line of a trace is one strict JSON object. The first is the header
``{"e": "header", "format": "colibri-trace", "version": 4, "layers": L, "experts": E, "top_k": k, "engine": {...}}``;
every other line is one event, its kind under "e" (token, page, slot, sequence, text, logprobs, note, dropped, names,
gauge) and the fields of events.py beside it. "names" adds names to the columns of the gauges after it. Version 3 had
the router in attention_ns and dispatch in experts_ns, version 2 no logprobs, version 1 neither these nor names nor
gauges, and no times of notes; all are read too.
"""

from __future__ import annotations

import html
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from colibri_lab.errors import ConfigError
from colibri_lab.events import GAUGE
from colibri_lab.export import write
from colibri_lab.paths import file_to_write

FORMAT, VERSION = "colibri-trace", 4
STREAMS = ("tokens", "pages", "slots", "sequences", "texts", "logprobs", "notes", "gauges")
Choice = tuple[int, str, float]  # id of a token, its text, natural log of its probability
Facts = dict[str, Any]


class TraceError(ValueError):
    """A file that is not a readable trace; says the file, the line and why."""


@dataclass
class Cursor:
    """Where one reader stands in each stream: the index of the next event to read."""

    at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    gaps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))  # recorded gaps already told


@dataclass
class Batch:
    """Events since a cursor's last read; arrays are copies, in the order they were written.

    tokens TOKEN [n]; route u2 and weight f2 [n, L, k]; slot i4 [n, L]; pages PAGES; slots SLOT; sequences SEQUENCE;
    texts [(sequence, position, piece)]; notes [(key, value, t_ns)]; gauges GAUGE, whose first columns have these names;
    logprobs [(sequence, position, chosen, best)], see Telemetry.logprobs;
    missing: events of each stream that were overwritten before this read, older than what the batch holds of it.
    """

    tokens: np.ndarray
    route: np.ndarray
    weight: np.ndarray
    slot: np.ndarray
    pages: np.ndarray
    slots: np.ndarray
    sequences: np.ndarray
    texts: list[tuple[int, int, str]]
    notes: list[tuple[str, Any, int]]
    missing: dict[str, int] = field(default_factory=dict)
    gauges: np.ndarray = field(default_factory=lambda: np.zeros(0, GAUGE))
    names: tuple[str, ...] = ()
    logprobs: list[tuple[int, int, Choice, list[Choice]]] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return sum(self.missing.values())

    def __len__(self) -> int:
        return sum(len(getattr(self, name)) for name in STREAMS)


class Source(Protocol):
    """What a reader needs: the live Telemetry or a ReplaySource."""

    live: bool  # False: read() stops at gaps, read until it is empty
    layers: int
    experts: int
    top_k: int

    @property
    def facts(self) -> Facts: ...
    def cursor(self) -> Cursor: ...
    def read(self, cursor: Cursor) -> Batch: ...
    def counters(self) -> dict[str, int]: ...


def _rows(kind: str, rows: np.ndarray, extra: dict[str, list[Any]] | None = None) -> Iterator[Facts]:
    columns = {name: rows[name].tolist() for name in rows.dtype.names or ()} | (extra or {})
    for values in zip(*columns.values(), strict=True):
        yield {"e": kind, **dict(zip(columns, values, strict=True))}


def _plain_weights(weight: np.ndarray) -> list[Any]:
    # five digits bring every float16 back; what is not finite has no place in strict JSON
    flat = [float(f"{w:.5g}") if w == w and abs(w) != np.inf else None for w in weight.ravel().tolist()]
    n, layers, k = weight.shape
    return [[flat[(i * layers + m) * k : (i * layers + m + 1) * k] for m in range(layers)] for i in range(n)]


def _events(batch: Batch, known: int) -> Iterator[Facts]:
    """The lines of a batch; `known` names of gauges were told before."""
    for stream, count in batch.missing.items():
        if count:
            yield {"e": "dropped", "stream": stream, "count": count}
    yield from ({"e": "note", "key": key, "value": value, "t_ns": t} for key, value, t in batch.notes)
    if batch.names[known:]:
        yield {"e": "names", "names": batch.names[known:]}
    for t, values in zip(batch.gauges["t_ns"].tolist(), batch.gauges["value"].tolist(), strict=True):
        yield {"e": "gauge", "t_ns": t, "value": [v if np.isfinite(v) else None for v in values[: len(batch.names)]]}
    yield from _rows("sequence", batch.sequences)
    yield from _rows("slot", batch.slots)
    yield from _rows("page", batch.pages)
    beside = {"route": batch.route.tolist(), "weight": _plain_weights(batch.weight), "slots": batch.slot.tolist()}
    yield from _rows("token", batch.tokens, beside)
    yield from ({"e": "text", "sequence": s, "position": p, "text": t} for s, p, t in batch.texts)
    for s, p, chosen, best in batch.logprobs:
        yield {"e": "logprobs", "sequence": s, "position": p, "chosen": chosen, "best": best}


def save(source: Source, path: str | os.PathLike[str], engine: Facts | None = None) -> Path:
    """Writes all that a recorded or kept run holds as a trace, whole or not at all; returns the path.

    `engine` as for Recorder. OSError names `path` where it cannot be written.
    """
    return write(path, _whole(source, engine))


def _whole(source: Source, engine: Facts | None) -> Iterator[bytes]:
    yield _line(_header(source, engine)).encode()
    cursor, known = source.cursor(), 0
    while len(batch := source.read(cursor)) or batch.dropped:
        for event in _events(batch, known):
            yield _line(event).encode()
        known = len(batch.names)


def _header(source: Source, engine: Facts | None) -> Facts:
    sizes = {"layers": source.layers, "experts": source.experts, "top_k": source.top_k}
    facts = {"engine": engine or source.facts.get("model", {})}
    return {"e": "header", "format": FORMAT, "version": VERSION, **sizes, **facts}


class Recorder:
    """Writes what a telemetry sees to `path` as it happens, from a thread of its own.

    The file grows under the name `<path>.part` and gets its own on close(); a .part left by a crash replays too.
    `engine` is engine.describe() or any JSON-able dict for the header. A full disk ends the recording, not the run:
    `error` holds the exception, close() raises it.
    """

    def __init__(self, telemetry: Source, path: str | os.PathLike[str], engine: Facts | None = None) -> None:
        if not getattr(telemetry, "enabled", True):
            raise ConfigError("settings: telemetry: must be on to record a trace")
        self.path = file_to_write(path)
        self.error: Exception | None = None
        self.events = 0
        self._part = self.path.with_name(self.path.name + ".part")
        self._source, self._cursor, self._names = telemetry, telemetry.cursor(), 0
        self._file: IO[str] | None = open(self._part, "w", encoding="utf-8", newline="\n")
        self._file.write(_line(_header(telemetry, engine)))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colibri-recorder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.1):
                self._drain()
        except Exception as error:  # kept for close(): the run that is recorded goes on
            self.error = error

    def _drain(self) -> None:
        assert self._file is not None
        batch = self._source.read(self._cursor)
        lines = [_line(event) for event in _events(batch, self._names)]
        self._names = len(batch.names)
        self._file.writelines(lines)
        self._file.flush()
        self.events += len(lines)

    def close(self) -> Path:
        """Writes what is left, gives the file its name, returns it. Raises what stopped the recording, if anything."""
        if self._file is None:
            return self.path
        self._stop.set()
        self._thread.join()
        try:
            if self.error is None:
                self._drain()
        finally:
            self._file.close()
            self._file = None
        if self.error is not None:
            raise self.error
        os.replace(self._part, self.path)
        return self.path

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        state = "recording" if self._file else "closed"
        return f"<b>Recorder</b> {state}: {self.events:,} events to <code>{html.escape(str(self.path))}</code>"


def _line(event: Facts) -> str:
    return json.dumps(event, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=str) + "\n"
