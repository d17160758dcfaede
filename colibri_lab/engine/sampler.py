"""The engine's counters over time: sampled into telemetry between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

EVERY_NS, WARN_NS = 100_000_000, 2_000_000_000


class Sampler:
    """`sample` is due when the clock has reached `due_ns`; between two samples a step pays for one comparison.

    read: gives the engine's `counters` method, or None when the engine is gone. warnings: what is to be said of the
    routers' logits; a change is noted when a request ends, and every other second meanwhile.
    """

    def __init__(self, read: Callable[[], Callable[[], Mapping[str, Any]] | None],
                 warnings: Callable[[], list[str]]) -> None:  # fmt: skip
        self._read, self._warnings = read, warnings
        self._told: list[str] = []
        self.due_ns = self._warn_ns = 0

    def sample(self, telemetry: Any, now: int, last: bool = False) -> None:
        """Tell telemetry all counters as they are now. last: nobody steps from here on."""
        self.due_ns = now + EVERY_NS
        if not telemetry.enabled or (counters := self._read()) is None:
            return
        telemetry.gauges(now, counters())
        if last or now >= self._warn_ns:
            self._warn_ns = now + WARN_NS
            if (said := self._warnings()) != self._told:
                self._told = said
                telemetry.note("router_warnings", said, now)
