"""The engine's counters over time: sampled into telemetry between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

EVERY_NS = 100_000_000


class Sampler:
    """`sample` is due when the clock has reached `due_ns`; between two samples a step pays for one comparison.

    read: gives the engine's `counters` method, or None when the engine is gone.
    """

    def __init__(self, read: Callable[[], Callable[[], Mapping[str, Any]] | None]) -> None:
        self._read = read
        self.due_ns = 0

    def sample(self, telemetry: Any, now: int) -> None:
        """Tell telemetry all counters as they are now."""
        self.due_ns = now + EVERY_NS
        if telemetry.enabled and (counters := self._read()) is not None:
            telemetry.gauges(now, counters())
