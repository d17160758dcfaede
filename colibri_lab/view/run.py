"""All that the board and the report show of one run: a fold over Batches, the same for any way of batching them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from colibri_lab.trace import Batch, Source
from colibri_lab.view.experts import ExpertView
from colibri_lab.view.gauges import Gauges
from colibri_lab.view.history import Rows, twin
from colibri_lab.view.kv import SlotView
from colibri_lab.view.prose import ProseView
from colibri_lab.view.runs import Meter, Run
from colibri_lab.view.timeline import Timeline

PAGE = 64 * 1024  # bytes
NOTES = 64  # newest ones that are kept with their time


class RunView:
    """`about` is engine.describe(); without it the sizes that it holds (slots, budget) stay unknown and unshown."""

    def __init__(self, layers: int, experts: int, top_k: int, about: dict[str, Any] | None = None) -> None:
        self.layers, self.n_experts, self.top_k = layers, experts, top_k
        self.about: dict[str, Any] = dict(about or {})
        self.rows = Rows(layers, top_k)
        self.experts = ExpertView(layers, experts, top_k)
        self.slots = SlotView(int(self.about.get("kv_slots") or 0), int(self.about.get("kv_slot_size") or 0))
        self.timeline = Timeline()
        self.prose = ProseView(self.rows, layers, top_k)
        self.gauges = Gauges()
        self.meter = Meter()
        self.facts: dict[str, Any] = {}
        self.notes: deque[tuple[str, Any, int]] = deque(maxlen=NOTES)
        self.events = self.missing = 0
        self.hue = "expert"  # what colours the KV slots: expert or sequence
        self.epoch = 0  # another one: its text does not go on from what was shown before

    @classmethod
    def of(cls, source: Source, about: dict[str, Any] | None = None) -> RunView:
        """All that a source still holds."""
        view = cls(source.layers, source.experts, source.top_k, about or source.facts.get("model"))
        view.drain(source, source.cursor())
        return view

    def copy(self) -> RunView:
        """The same picture, that takes events on its own."""
        out = twin(self)
        out.rows, out.experts, out.slots = twin(self.rows), twin(self.experts), twin(self.slots)
        out.timeline, out.gauges, out.meter = twin(self.timeline), twin(self.gauges), self.meter.copy()
        out.prose = twin(self.prose)
        out.prose.rows = out.rows
        return out

    def drain(self, source: Source, cursor: Any, kept: Callable[[Batch], None] | None = None) -> int:
        """Takes what is new, to the end; returns how many events that were, the missed ones with them. kept: who is
        given each batch after it was taken."""
        before = self.events + self.missing
        while True:
            batch = source.read(cursor)
            if not len(batch) and not batch.dropped:
                break
            self.take(batch)
            if kept is not None:
                kept(batch)
            if source.live:  # what a live source writes meanwhile is for the next time
                break
        return self.events + self.missing - before

    def take(self, batch: Batch) -> None:
        self.events += len(batch)
        self.missing += batch.dropped
        for key, value, t in batch.notes:
            self.facts[key] = value
            self.notes.append((key, value, t))
            if key == "snapshot":
                self._restore(value, t)
            if key in ("model", "settings") and isinstance(value, dict):
                self.about.update({k: v for k, v in value.items() if v is not None})
        self.rows.take(batch)
        self.experts.take(batch)
        self.slots.take(batch)
        self.timeline.take(batch)
        self.prose.take(batch)
        self.gauges.take(batch)
        self.meter.take(batch, self.gauges)

    def _restore(self, told: dict[str, Any], t_ns: int) -> None:
        if "resident" in told:
            self.experts.snapshot(t_ns, told["resident"], told["pinned"], told.get("ahead"), told.get("device"))
        self.slots.snapshot(t_ns, told["slots"], more="resident" not in told)

    def keep(self, name: str) -> Run:
        """The run since the last start, frozen. ValueError where nothing ran yet."""
        return self.meter.keep(name, self.gauges, self.about)

    @property
    def prompt(self) -> str:
        """Of the sequence whose text is shown, where it is known."""
        said = self.facts.get("prompt")
        mine = isinstance(said, dict) and said.get("sequence") == self.prose.sequence
        return str(said.get("text", "")) if mine and isinstance(said, dict) else ""

    @property
    def warnings(self) -> list[str]:
        """What the engine said of its routers' logits, if anything."""
        said = self.facts.get("router_warnings")
        return [str(line)[:160] for line in said[:16]] if isinstance(said, list) else []

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.about.get("model") or "a run")

    def line(self) -> str:
        """The model in one line."""
        parts = [self.name, f"{self.layers} x {self.n_experts} experts, top-{self.top_k}"]
        parts += [str(self.about[key]) for key in ("quantize", "backend") if self.about.get(key)]
        return " · ".join(parts) + (f" {self.about['isa']}" if self.about.get("isa") else "")

    @property
    def budget_bytes(self) -> int | None:
        """The expert cache budget in force, as far as it was told."""
        value = self.about.get("expert_cache_bytes")
        return int(value) if value else None

    @property
    def pages(self) -> int | None:
        """Pages of an expert, all of which come and go together."""
        size = self.about.get("expert_bytes")
        return max(1, -(-int(size) // PAGE)) if size else None

    @property
    def resident_bytes(self) -> int | None:
        size = self.about.get("expert_bytes")
        return int(np.count_nonzero(self.experts.resident)) * int(size) if size else None
