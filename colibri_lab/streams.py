"""Events kept in memory as arrays, read up to a moment: a recorded run, and the last minutes of one that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from colibri_lab.events import GAUGE, PAGES, SEQUENCE, SLOT, TOKEN
from colibri_lab.rings import joined
from colibri_lab.trace import STREAMS, Batch, Cursor, Facts

Drops = dict[str, list[tuple[int, int]]]  # per stream: (index of the next event, how many are missing before it)
LISTS = {"texts": 120, "notes": 400, "logprobs": 900}  # streams that are no arrays, with the bytes of an event, about


class Streams:
    """streams: a Batch's arrays and lists by name, layers L, experts E a layer, k experts a token; names: of gauges.

    Time is that of the events (perf_counter_ns); in each stream it never runs backwards.
    """

    live = False

    def __init__(self, layers: int, experts: int, top_k: int, streams: dict[str, Any], drops: Drops,
                 names: tuple[str, ...] = ()) -> None:  # fmt: skip
        self.layers, self.experts, self.top_k, self.names = layers, experts, top_k, names
        self._streams, self._drops = streams, drops

    @classmethod
    def of(cls, layers: int, experts: int, top_k: int, parts: Sequence[Batch | Streams]) -> Streams:
        """What one reader read, in the order in which it did."""
        streams: dict[str, Any] = {name: [none] for name, none in nothing(layers, top_k).items()}
        drops: Drops = {name: [] for name in STREAMS}
        counts = dict.fromkeys(STREAMS, 0)
        for part in parts:
            have, gaps = (part._streams, part._drops) if isinstance(part, Streams) else (vars(part), _begins(part))
            for name, told in gaps.items():
                drops[name] += [(counts[name] + at, missed) for at, missed in told]
            for name in STREAMS:
                counts[name] += len(have[name])
            for name, pieces in streams.items():
                pieces.append(have[name])
        listed = {name: [event for piece in streams.pop(name) for event in piece] for name in LISTS}
        arrays = {name: joined(pieces) for name, pieces in streams.items()}
        return cls(layers, experts, top_k, arrays | listed, drops, parts[-1].names if parts else ())

    @property
    def nbytes(self) -> int:
        lists = sum(size * len(self._streams[name]) for name, size in LISTS.items())
        return lists + sum(part.nbytes for part in self._streams.values() if isinstance(part, np.ndarray))

    @cached_property
    def times(self) -> dict[str, np.ndarray]:
        """u8 of each event of each stream. Text, and what it was chosen from, are there when the row before it is."""
        rows = self._streams["tokens"]
        key = (rows["sequence"].astype("u8") << np.uint64(32)) + rows["position"] + np.uint64(1)
        order = np.argsort(key, kind="stable")
        told = {name: self._streams[name]["t_ns"] for name in ("tokens", "pages", "slots", "sequences", "gauges")}
        told["notes"] = np.array([t for *_, t in self._streams["notes"]], "u8")
        for name in ("texts", "logprobs"):
            said = self._streams[name]
            sequence, position = (np.fromiter((event[i] for event in said), "u8", len(said)) for i in (0, 1))
            wanted = (sequence << np.uint64(32)) + position
            at = np.searchsorted(key[order], wanted, "right") - 1
            told[name] = np.zeros(len(said), "u8")
            known = at >= 0
            known[known] = key[order][at[known]] == wanted[known]
            told[name][known] = rows["t_ns"][order[at[known]]]
        return {name: np.maximum.accumulate(t) if len(t) else t.astype("u8") for name, t in told.items()}

    def __getitem__(self, name: str) -> Any:
        """An array or a list, not to be changed."""
        return self._streams[name]

    @cached_property
    def moments(self) -> np.ndarray:
        """u8 [n]: when each sampled token was there, in order; tokens of one step share it."""
        sampled: np.ndarray = self.times["tokens"][self._streams["tokens"]["token"] >= 0]
        return sampled

    @cached_property
    def start_ns(self) -> int:
        """The first event with a time, notes apart; 0 where there is none."""
        first = [int(t[t > 0][0]) for name, t in self.times.items() if name != "notes" and (t > 0).any()]
        return min(first, default=0)

    @cached_property
    def end_ns(self) -> int:
        return max((int(t[-1]) for name, t in self.times.items() if name != "notes" and len(t)), default=0)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(how many tokens were sampled before it, rows missed) of each gap among the token rows."""
        sampled = np.concatenate([[0], np.cumsum(self._streams["tokens"]["token"] >= 0)])
        return [(int(sampled[at]), missed) for at, missed in self._drops["tokens"]]

    def cursor(self) -> Cursor:
        return Cursor()

    def read(self, cursor: Cursor) -> Batch:
        """All that is left, or up to the next gap: read again until a batch is empty and has no `dropped`."""
        return self.read_until(cursor, None)

    def read_until(self, cursor: Cursor, t_ns: int | None) -> Batch:
        """What happened from the cursor to `t_ns`, or to the next gap; None reads to the end."""
        cut: dict[str, slice] = {}
        missing: dict[str, int] = {}
        for name in STREAMS:
            start, end = cursor.at[name], len(self._streams[name])
            if t_ns is not None and start < end:
                end = max(start, int(self.times[name].searchsorted(np.uint64(t_ns), "right")))
            for at, count in self._drops[name][cursor.gaps[name] :]:
                if at > start:
                    end = min(end, at)
                    break
                missing[name] = missing.get(name, 0) + count
                cursor.gaps[name] += 1
            cut[name] = slice(start, end)
            cursor.at[name] = end
        part = {name: rows[cut.get(name, cut["tokens"])] for name, rows in self._streams.items()}
        return Batch(**{name: rows.copy() for name, rows in part.items()}, missing=missing, names=self.names)

    def rest(self, cursor: Cursor) -> list[Batch]:
        """All that is left from the cursor on, which moves to the end."""
        batches = []
        while len(batch := self.read(cursor)) or batch.dropped:
            batches.append(batch)
        return batches

    def counters(self) -> dict[str, int]:
        dropped = sum(count for drops in self._drops.values() for _, count in drops)
        return {"events": sum(len(self._streams[name]) for name in STREAMS), "dropped": dropped}

    @property
    def facts(self) -> Facts:
        """The newest value of each note."""
        return {key: value for key, value, _ in self._streams["notes"]}


def _begins(batch: Batch) -> Drops:
    """What is missing of a batch is older than what it holds."""
    return {name: [(0, missed)] for name, missed in batch.missing.items()}


def nothing(layers: int, top_k: int) -> dict[str, Any]:
    """A Batch's arrays and lists, empty."""
    shapes = {"route": ((0, layers, top_k), "u2"), "weight": ((0, layers, top_k), "f2"), "slot": ((0, layers), "i4")}
    empty: dict[str, Any] = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    kinds = {"tokens": TOKEN, "pages": PAGES, "slots": SLOT, "sequences": SEQUENCE, "gauges": GAUGE}
    return empty | {name: np.zeros(0, dtype) for name, dtype in kinds.items()} | {name: [] for name in LISTS}
