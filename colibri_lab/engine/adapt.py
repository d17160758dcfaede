"""The batch size follows the machine: halved when memory gets tight, one more at a time while the processor idles."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as clock
from typing import Any

from .batcher import Batcher
from .probe import HostProbe, Probe, Reading

FULL = 0.85  # of memory: above it the batch is halved
CALM = 0.80  # a reading up to here is quiet; between the two nothing changes
IDLE = 0.30  # of the processor: above it the batch may grow
QUIET = 4  # quiet readings in a row before it grows again


class BatchSize:
    """How many requests may advance together. Requests above it keep their seats and KV slots and wait; the oldest go
    first, so that they end and give memory back. Composition never changes tokens, so nothing else has to know.

    Looks at the machine between two steps, when the interval is over; no thread of its own. on_device: the model's
    weights lie in GPU memory, so that memory counts too.
    """

    def __init__(self, most: int, interval_ms: int | None, note: Callable[[dict[str, Any]], None],
                 on_device: bool = False) -> None:  # fmt: skip
        """note: is told of every change, with its reason. For the others see `reset`."""
        self._note, self._on_device = note, on_device
        self._probe: Probe | None = None  # the machine's is made when it is first needed
        self._reading: Reading | None = None
        self._due = self._quiet = 0
        self.readings = self.halvings = self.growths = 0
        self.held = 0  # requests that a step left out, summed over steps
        self.reset(most, interval_ms)

    def reset(self, most: int, interval_ms: int | None) -> None:
        """Begin anew at the largest size, with a look every so often; None: never, the size stays."""
        self.cap = self._most = most
        self._interval = None if interval_ms is None else interval_ms * 1_000_000
        self._quiet = 0
        if self._probe is None and interval_ms is not None:
            self._probe = HostProbe()

    def follow(self, probe: Probe) -> None:
        """Other readings from now on."""
        self.close()
        self._probe = probe

    def now(self, batcher: Batcher) -> int:
        """The most requests of the next step."""
        if self._interval is not None and (begin := clock()) >= self._due:
            self._due = begin + self._interval
            self._look(batcher)
        return self.cap

    def _look(self, batcher: Batcher) -> None:
        assert self._probe is not None
        try:
            reading = self._reading = self._probe.read()
        except StopIteration:  # recorded readings have come to their end
            return
        self.readings += 1
        if not batcher.running:
            return  # it tells of the rest before this step; the next one tells of work
        used = {"memory": reading.memory, "GPU memory": (reading.device or 0.0) if self._on_device else 0.0}
        fullest = max(used, key=lambda name: used[name])
        share = used[fullest]
        self._quiet = self._quiet + 1 if share <= CALM else 0
        held_back = len(batcher.running) + len(batcher.waiting) + len(batcher.incoming) > self.cap
        if share > FULL and self.cap > 1:
            self.halvings += 1
            self._change(self.cap // 2, f"{fullest} is {share:.0%} in use, above {FULL:.0%}", batcher)
        elif self._quiet >= QUIET and reading.idle > IDLE and self.cap < self._most and held_back:
            self.growths += 1
            self._change(self.cap + 1, f"the processor idles {reading.idle:.0%}, above {IDLE:.0%}", batcher)

    def _change(self, cap: int, why: str, batcher: Batcher) -> None:
        before, self.cap = self.cap, cap
        reading = self._reading
        assert reading is not None
        waiting = len(batcher.waiting) + len(batcher.incoming)
        self._note(
            {"before": before, "after": cap, "reason": why, "memory": round(reading.memory, 3),
             "idle": round(reading.idle, 3), "running": len(batcher.running), "waiting": waiting}
        )  # fmt: skip

    def counters(self) -> dict[str, int]:
        """Shares per mille, of the last reading; 0 before there is one."""
        last = self._reading or Reading(0.0, 0.0)
        return {
            "cap": self.cap,
            "readings": self.readings,
            "adaptations": self.halvings + self.growths,
            "halvings": self.halvings,
            "growths": self.growths,
            "held": self.held,
            "memory_permille": round(1000 * last.memory),
            "device_permille": round(1000 * (last.device or 0.0)),
            "idle_permille": round(1000 * last.idle),
        }

    def describe(self) -> str | None:
        """What is read; None where nothing is."""
        if self._interval is None:
            return None
        return self._probe.describe() if isinstance(self._probe, HostProbe) else type(self._probe).__name__

    def close(self) -> None:
        if isinstance(self._probe, HostProbe):
            self._probe.close()
