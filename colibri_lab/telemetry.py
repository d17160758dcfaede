"""What the engine did, in preallocated rings that one thread writes and any thread reads.

The writer never waits and never asks who reads: it overwrites the oldest entries. A reader that was too slow finds
out from the counters and reports how many it missed (Batch.missing).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from colibri_lab.events import GAUGE, GAUGES, PAGES, SEQUENCE, SLOT, TOKEN, Phase
from colibri_lab.recorded import ReplaySource, replay
from colibri_lab.rings import Deferred, Objects, Records, Ring
from colibri_lab.trace import Batch, Choice, Cursor, Facts, Recorder, Source, TraceError

__all__ = ["Batch", "Cursor", "NullTelemetry", "Recorder", "ReplaySource", "Source", "Telemetry"]
__all__ += ["TraceError", "replay"]

_U4, _U2 = (1 << 32) - 1, (1 << 16) - 1


class Telemetry:
    """Events of one engine: layers L, experts E a layer, k experts a token; `capacity` rows in each ring."""

    enabled = live = True

    def __init__(self, layers: int, experts: int, top_k: int, capacity: int = 16384) -> None:
        self.layers, self.experts, self.top_k = layers, experts, top_k
        beside = (("u2", (layers, top_k)), ("f2", (layers, top_k)), ("i4", (layers,)))
        self._tokens = Deferred(capacity, TOKEN, *beside)
        self._pages, self._slots = Records(capacity, PAGES), Records(capacity, SLOT)
        self._sequences = Records(min(capacity, 4096), SEQUENCE)
        self._gauges = Ring(min(capacity, 1024), (GAUGE, ()))
        self._texts, self._notes = Objects(capacity), Objects(min(capacity, 1024))
        self._logprobs = Objects(min(capacity, 4096))
        # in the order they are read: a piece of text is written after its row, so its row is in the same batch
        self._rings: dict[str, Ring] = {
            "notes": self._notes,
            "texts": self._texts,
            "logprobs": self._logprobs,
            "sequences": self._sequences,
            "gauges": self._gauges,
        }
        self._rings |= {"pages": self._pages, "slots": self._slots, "tokens": self._tokens}
        self._names: dict[str, int] = {}  # of gauges, with their columns
        self._row, self._route, self._weight, self._slot = self._tokens.arrays
        self._columns = {name: self._row[name] for name in TOKEN.names or ()}
        self._same = np.zeros(1, TOKEN)  # what all rows of a step share
        self._facts: Facts = {}
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._dropped = 0

    # -- writing: the engine's thread; no lock, no allocation that grows --

    def step(
        self,
        t_ns: int,
        sequence: Any,
        position: Any,
        token: Any,
        phase: Any,
        latency_ns: int,
        attention_ns: int,
        router_ns: int,
        dispatch_ns: int,
        io_ns: int,
        experts_ns: int,
        head_ns: int,
        faults: int,
        hits: int,
        evictions: int,
        bytes_read: int,
        route: Any,
        weight: Any,
        slot: Any,
    ) -> None:
        """One step of n rows: arrays [n] (phase: [n] or one for all), route u2 and weight f2 [n, L, k], slot i4 [n, L].

        Times are the whole step's, in nanoseconds; the share of a row is worked out here as events.TOKEN says.
        """
        n, ring = len(sequence), self._tokens
        if n == 0:
            return
        if n == 1:
            one = phase if isinstance(phase, int) else int(np.ravel(phase)[0])
            self.one(
                t_ns, int(sequence[0]), int(position[0]), int(token[0]), one, latency_ns, attention_ns, router_ns,
                dispatch_ns, io_ns, experts_ns, head_ns, faults, hits, evictions, bytes_read, route[0], weight[0],
                np.asarray(slot[0]).tolist(),
            )  # fmt: skip
            return
        ring.settle()
        one_phase = np.ndim(phase) == 0
        each: Any = latency_ns // n if one_phase and phase == Phase.PREFILL else latency_ns
        self._same[0] = (
            t_ns, 0, 0, 0, phase if one_phase else 0, n, each, min(attention_ns // n, _U4), min(router_ns // n, _U4),
            min(dispatch_ns // n, _U4), min(io_ns // n, _U4), min(experts_ns // n, _U4), min(head_ns // n, _U4),
            0, 0, 0, 0,
        )  # fmt: skip
        differ = {"sequence": sequence, "position": position, "token": token}
        if not one_phase:
            each = np.where(np.equal(phase, Phase.PREFILL), latency_ns // n, latency_ns)
            differ |= {"phase": phase, "latency_ns": each}
        if n > ring.size:  # a step longer than the ring: only its end can be kept
            first = n - ring.size
            differ = {name: values[first:] for name, values in differ.items()}
            route, weight, slot = route[first:], weight[first:], slot[first:]
            ring.claimed = ring.written = ring.written + first
        last = self._put(min(n, ring.size), differ, route, weight, slot)
        row = self._row[last]
        row["faults"], row["hits"], row["evictions"] = min(faults, _U2), min(hits, _U2), min(evictions, _U2)
        row["bytes_read"] = bytes_read
        ring.publish()

    def one(
        self,
        t_ns: int,
        sequence: int,
        position: int,
        token: int,
        phase: int,
        latency_ns: int,
        attention_ns: int,
        router_ns: int,
        dispatch_ns: int,
        io_ns: int,
        experts_ns: int,
        head_ns: int,
        faults: int,
        hits: int,
        evictions: int,
        bytes_read: int,
        route: Any,
        weight: Any,
        slot: list[int],
    ) -> None:
        """A step of one row: numbers, route and weight [L, k], slot as a list of L ints. These three are kept as they
        are, so they must not change any more.

        After a step that read all its weights from memory no cache holds this code or its data: what it touches is what
        it costs, so the row is put into arrays later, many at a time.
        """
        self._tokens.hold(
            (
                t_ns, sequence, position, token, phase, 1,
                latency_ns, min(attention_ns, _U4), min(router_ns, _U4), min(dispatch_ns, _U4), min(io_ns, _U4),
                min(experts_ns, _U4), min(head_ns, _U4),
                min(faults, _U2), min(hits, _U2), min(evictions, _U2), bytes_read, route, weight, slot,
            )
        )  # fmt: skip

    def _put(self, n: int, differ: dict[str, Any], route: Any, weight: Any, slot: Any) -> int:
        """Claims and fills n rows, in two parts where the ring ends; returns the index of the last. `step` settles."""
        ring = self._tokens
        at = ring.written
        ring.claimed = at + n
        i, done = at % ring.size, 0
        while done < n:
            take = min(n - done, ring.size - i)
            to, part = slice(i, i + take), slice(done, done + take)
            self._row[to] = self._same
            for name, values in differ.items():
                self._columns[name][to] = values[part]
            self._route[to] = route[part]
            self._weight[to] = weight[part]
            self._slot[to] = slot[part]
            done, i = done + take, (i + take) % ring.size
        return (at + n - 1) % ring.size

    def page(self, t_ns: int, kind: int, layer: int, expert: int, pages: int, wait_ns: int, step: int) -> None:
        self._pages.put((t_ns, kind, layer, expert, pages, min(wait_ns, _U4), step & _U4))

    def slot(self, t_ns: int, kind: int, slot: int, sequence: int, layer: int, owner: int) -> None:
        self._slots.put((t_ns, kind, slot, sequence, layer, owner))

    def sequence(self, t_ns: int, kind: int, sequence: int, prompt_tokens: int, detail: int = 0) -> None:
        self._sequences.put((t_ns, kind, sequence, prompt_tokens, detail))

    def text(self, sequence: int, position: int, text: str) -> None:
        """The decoded piece of the token at `position` of `sequence`."""
        self._texts.put((sequence, position, text))

    def logprobs(self, sequence: int, position: int, chosen: Choice, best: list[Choice]) -> None:
        """What the token at `position` of `sequence` was chosen from: it and the most probable ones, best first."""
        self._logprobs.put((sequence, position, chosen, best))

    def gauges(self, t_ns: int, counters: Mapping[str, Any]) -> None:
        """A sample of counters(): nested names become "pager.faults". At most GAUGES names; others are noted."""
        values = dict(_flat(counters))
        if new := [name for name in values if name not in self._names]:
            room = GAUGES - len(self._names)
            self._names = self._names | {name: len(self._names) + i for i, name in enumerate(new[:room])}
            if new[room:] and "gauges_left_out" not in self._facts:
                self.note("gauges_left_out", new[room:])
        row = [values.get(name, math.nan) for name in self._names]
        self._gauges.put((t_ns, row + [math.nan] * (GAUGES - len(row))))

    def note(self, key: str, value: Any, t_ns: int | None = None) -> None:
        """A rare fact (JSON-able), from any thread: a setting that changed, the model described. t_ns: None is now."""
        with self._lock:
            self._facts = {**self._facts, key: value}
            self._keep((key, value, clock() if t_ns is None else t_ns))

    def _keep(self, note: tuple[str, Any, int]) -> None:
        self._notes.put(note)

    # -- reading: any thread --

    @property
    def facts(self) -> Facts:
        """The latest value of every note."""
        return dict(self._facts)

    def cursor(self) -> Cursor:
        """A reader's place, at the oldest event that is still kept."""
        return Cursor({name: ring.oldest() for name, ring in self._rings.items()})

    def read(self, cursor: Cursor) -> Batch:
        """Copies what was written since the cursor's last read and moves it on."""
        parts: dict[str, list[Any]] = {}
        missing: dict[str, int] = {}
        for name, ring in self._rings.items():
            take = ring.take if isinstance(ring, Objects) else ring.read
            end, missed, parts[name] = take(cursor.at[name])
            cursor.at[name] = end
            if missed:
                missing[name] = missed
        if missing:
            with self._reading:
                self._dropped += sum(missing.values())
        tokens, route, weight, slot = parts["tokens"]
        pages, slots, sequences, gauges = (parts[name][0] for name in ("pages", "slots", "sequences", "gauges"))
        lists = parts["texts"], parts["notes"]
        names = tuple(self._names)
        return Batch(
            tokens, route, weight, slot, pages, slots, sequences, *lists, missing, gauges, names, parts["logprobs"]
        )

    def counters(self) -> dict[str, int]:
        """events written; dropped: events that some reader was too slow for."""
        return {"events": sum(ring.end for ring in self._rings.values()), "dropped": self._dropped}

    def _repr_html_(self) -> str:
        counts = self.counters()
        return (
            f"<b>Telemetry</b> {self.layers} layers x {self.experts} experts, top-{self.top_k}: "
            f"{counts['events']:,} events, {counts['dropped']:,} dropped by slow readers"
        )


class NullTelemetry(Telemetry):
    """Takes every event and keeps none, for `telemetry: false`; facts are kept, they cost nothing."""

    enabled = False

    def __init__(self, layers: int = 0, experts: int = 0, top_k: int = 0, capacity: int = 1) -> None:
        super().__init__(layers, experts, top_k, capacity)

    def _nothing(self, *_: Any, **__: Any) -> None:
        return

    step = one = page = slot = sequence = text = logprobs = gauges = _keep = _nothing


def _flat(counters: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in counters.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, (int, float)):
            yield before + name, float(value)
