"""What-if: shadow caches fed by the run's own trace, as words and numbers for the board and as a figure."""

from __future__ import annotations

from typing import Any

from colibri_lab.analysis.shadow import BOUNDS, Shadow
from colibri_lab.config import Config
from colibri_lab.pager.policies import POLICIES
from colibri_lab.trace import Source
from colibri_lab.view.curves import Curves

NAMES = {"belady_forced": "Belady, must keep what it reads", "belady": "Belady"}


class WhatIf:
    """Reads a source with a cursor of its own, so nothing is spent before somebody looks.

    about: what engine.describe() says; its budget and policy are the place where the engine stands.
    """

    def __init__(self, source: Source, about: dict[str, Any]) -> None:
        self._source, self._cursor, self._about = source, source.cursor(), about
        given = about.get("settings_given")
        names = ("pin_after_tokens", "pin_max_share")
        pins = {name: given[name] for name in names if name in given} if isinstance(given, dict) else {}
        config = Config.make(pins, "the recorded settings")  # a trace's header is checked like any other file
        after, share = config.pin_after_tokens, config.pin_max_share
        self.shadow = Shadow(source.layers, source.experts, source.top_k, after, share)

    def feed(self) -> None:
        """Takes what is new; after a gap the window begins anew."""
        while True:
            batch = self._source.read(self._cursor)
            if batch.missing.get("tokens"):
                self.shadow.clear()
            self.shadow.take(batch.tokens, batch.route)
            if self._source.live or not (len(batch) or batch.dropped):
                break
        size, budget = self._about.get("expert_bytes"), self._about.get("expert_cache_bytes")
        self.shadow.now = None
        if isinstance(size, int) and isinstance(budget, int) and size > 0 and budget > 0:
            most = self._source.layers * self._source.experts
            self.shadow.now = min(most, max(self._source.top_k, budget // size))

    @property
    def engine_rate(self) -> float | None:
        """Of the engine itself, over the steps of the window."""
        asked = self.shadow.hits + self.shadow.faults
        return self.shadow.hits / asked if asked else None

    def told(self) -> dict[str, Any]:
        """For the board: capacities in per cent of all experts, rates in hundredths of a per cent."""
        shadow, places = self.shadow, self.shadow.curves()
        everything = self._source.layers * self._source.experts
        lines = {
            NAMES.get(name, name): [None if v is None else round(v, 4) for v in values]
            for name, values in places[1].items()
        }
        return {
            "x": [round(100 * c / everything, 2) for c in places[0]],
            "experts": places[0],
            "lines": lines,
            "now": shadow.now and places[0].index(shadow.now),
            "rate": self.engine_rate and round(self.engine_rate, 4),
            "policy": str(self._about.get("eviction_policy") or ""),
            "prefetcher": str(self._about.get("prefetcher") or "none"),
            "steps": shadow.steps,
            "behind": shadow.behind,
        }

    def figure(self) -> Curves:
        """All of the run so far, the caches caught up; the engine's own place is marked."""
        self.feed()
        self.shadow.work()
        places, lines = self.shadow.curves()
        everything = self._source.layers * self._source.experts
        known = {
            NAMES.get(name, name): [v for v in lines[name] if v is not None]
            for name in (*POLICIES, *BOUNDS)
            if None not in lines[name]
        }
        x = [round(100 * c / everything, 1) for c in places] if known else []
        rate, now = self.engine_rate, self.shadow.now
        mark = (100 * now / everything, rate, f"engine now: {100 * rate:.1f} %") if rate is not None and now else None
        title = f"What if: expert hits over {self.shadow.steps} steps"
        return Curves(title, "budget, % of all experts", x, known, mark)
