"""Reads trace.jsonl back: ReplaySource has the reading side of Telemetry. The file is hostile until checked."""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab import tracelines
from colibri_lab.events import GAUGE, PAGES, SEQUENCE, SLOT, TOKEN
from colibri_lab.streams import Drops, Streams, nothing
from colibri_lab.trace import STREAMS, Facts, TraceError
from colibri_lab.tracelines import BAD, LIMITS, MAX_SLOTS, check_sizes, number, why

_CHUNK = 4096  # lines held as Python objects before they become arrays
_RECORDS = {"page": PAGES, "slot": SLOT, "sequence": SEQUENCE, "token": TOKEN}
LATER = ("router_ns", "dispatch_ns")  # fields of TOKEN that traces before version 4 did not have: 0
_STREAM = {"token": "tokens", "page": "pages", "slot": "slots", "sequence": "sequences"}
_STREAM |= {"text": "texts", "logprobs": "logprobs", "note": "notes", "gauge": "gauges"}


class ReplaySource(Streams):
    """A recorded run: `engine` is its header's dict, `trouble` lists what was wrong with the file, if anything."""

    def __init__(self, path: Path, header: Facts, streams: dict[str, Any], drops: Drops, trouble: list[str],
                 names: tuple[str, ...] = ()) -> None:  # fmt: skip
        layers, experts, top_k = (int(header[name]) for name in LIMITS)
        super().__init__(layers, experts, top_k, streams, drops, names)
        self.path, self.trouble = path, trouble
        self.engine: Facts = header["engine"]

    @property
    def facts(self) -> Facts:
        return {"model": self.engine}

    def _repr_html_(self) -> str:
        counts = self.counters()
        rows = [("file", self.path.name), ("layers, experts, top-k", f"{self.layers}, {self.experts}, {self.top_k}")]
        rows += [("token rows", f"{len(self._streams['tokens']):,}"), ("events", f"{counts['events']:,}")]
        rows += [("dropped", f"{counts['dropped']:,}"), ("seconds", f"{(self.end_ns - self.start_ns) / 1e9:.1f}")]
        rows += [("note", note) for note in self.trouble]
        cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
        return f"<table><caption>Recorded run</caption>{cells}</table>"


class _Reader:
    """Collects the events of one file, line by line, into arrays."""

    def __init__(self, path: Path) -> None:
        self.path, self.trouble = path, list[str]()
        self.header: Facts = {}
        self.names: list[str] = []
        self.samples: list[tuple[int, np.ndarray]] = []
        self.held: dict[str, list[tuple[int, Facts]]] = {kind: [] for kind in _RECORDS}
        self.done: dict[str, list[Any]] = {name: [] for name in (*_STREAM.values(), "route", "weight", "slot")}
        self.counts = dict.fromkeys(STREAMS, 0)
        self.drops: Drops = {name: [] for name in STREAMS}

    def fail(self, line: int, why: str) -> TraceError:
        return TraceError(f"{self.path}: line {line}: {why}")

    def take(self, line: int, event: Facts) -> None:
        kind = event.get("e")
        if kind in _RECORDS:
            self.held[kind].append((line, event))
            self.counts[_STREAM[kind]] += 1
            if len(self.held[kind]) >= _CHUNK:
                self.flush(kind)
        elif kind == "text":
            at = [number(event, name, 1 << 32) for name in ("sequence", "position")]
            self.done["texts"].append((*at, str(event["text"])))
            self.counts["texts"] += 1
        elif kind == "logprobs":
            at = [number(event, name, 1 << 32) for name in ("sequence", "position")]
            of = tracelines.choice(event["chosen"]), tracelines.choices(event["best"])
            self.done["logprobs"].append((*at, *of))
            self.counts["logprobs"] += 1
        elif kind == "note":
            if event["key"] in ("model", "settings") and isinstance(event["value"], dict):
                check_sizes(event["value"])
            if event["key"] == "snapshot":
                tracelines.check_snapshot(event["value"], self.header)
            t = number(event, "t_ns", 1 << 63) if "t_ns" in event else 0  # version 1 had no times of notes
            self.done["notes"].append((str(event["key"]), event["value"], t))
            self.counts["notes"] += 1
        elif kind == "names":
            self.names += tracelines.names(event, self.names)
        elif kind == "gauge":
            self.samples.append(tracelines.sample(event, len(self.names)))
            self.counts["gauges"] += 1
        elif kind == "dropped":
            count = number(event, "count", 1 << 62)
            self.drops[str(event["stream"])].append((self.counts[str(event["stream"])], count))
        else:
            raise ValueError(f"unknown event {str(kind)[:40]!r}")

    def flush(self, kind: str) -> None:
        held, self.held[kind] = self.held[kind], []
        try:
            self.arrays(kind, [event for _, event in held])
        except BAD:
            for line, event in held:  # again one by one, to name the line
                try:
                    self.arrays(kind, [event], keep=False)
                except BAD as error:
                    raise self.fail(line, why(error)) from None
            raise self.fail(held[0][0], "events from here on do not fit together") from None

    def arrays(self, kind: str, events: list[Facts], keep: bool = True) -> None:
        rows, n = np.zeros(len(events), _RECORDS[kind]), len(events)
        unknown = LATER if self.header["version"] < 4 else ()
        for name in rows.dtype.names or ():
            if name not in unknown:
                rows[name] = [event[name] for event in events]
        made: dict[str, Any] = {_STREAM[kind]: rows}
        if kind == "token":
            layers, k = self.header["layers"], self.header["top_k"]
            weights = np.array([event["weight"] for event in events], "f8")  # null reads as nan
            made["route"] = np.array([event["route"] for event in events], "u2").reshape(n, layers, k)
            made["weight"] = weights.reshape(n, layers, k).astype("f2")
            made["slot"] = np.array([event["slots"] for event in events], "i4").reshape(n, layers)
        slots = rows["slot"] if kind == "slot" else made.get("slot", np.zeros(0))
        if slots.size and slots.max() >= MAX_SLOTS:
            raise ValueError(f"slot {slots.max()} is past {MAX_SLOTS}")
        for name, part in made.items() if keep else ():
            self.done[name].append(part)

    def result(self) -> ReplaySource:
        for kind in _RECORDS:
            self.flush(kind)
        arrays = nothing(self.header["layers"], self.header["top_k"]) | {"gauges": self.gauges()}
        streams: dict[str, Any] = {
            name: np.concatenate([none, *self.done[name]]) if isinstance(none, np.ndarray) else self.done[name]
            for name, none in arrays.items()
        }
        return ReplaySource(self.path, self.header, streams, self.drops, self.trouble, tuple(self.names))

    def gauges(self) -> np.ndarray:
        out = np.zeros(len(self.samples), GAUGE)
        out["value"] = np.nan
        for row, (t, values) in zip(out, self.samples, strict=True):
            row["t_ns"] = t
            row["value"][: len(values)] = values
        return out


def replay(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> ReplaySource:
    """Opens a trace. A last line cut short is left out and told in `.trouble`; all else wrong raises TraceError."""
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    lines = tracelines.objects(path)
    first = next(lines, (1, None, ""))
    reader = _Reader(path)
    reader.header = tracelines.header(path, first[1])
    for line, found, said in lines:
        if found is None and said.startswith("cut"):
            reader.trouble.append(f"line {line} was cut short and is left out; the {line - 1} before it are whole")
            break
        if found is None:
            raise reader.fail(line, said)
        try:
            reader.take(line, found)
        except TraceError:
            raise
        except BAD as error:
            raise reader.fail(line, why(error)) from None
        if progress is not None and line % _CHUNK == 0:
            progress(line)
    return reader.result()
