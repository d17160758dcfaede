"""Fair timing on a machine that others use too: interleaved sides, three clocks, medians and spread.

Each measured block has wall time, CPU time of this process (all threads) and run-queue delay: the time its threads were
ready but another process had the core. With one busy thread CPU time is the figure to trust; wall time is to be read
together with the delay beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Block:
    """One measured block: `work` units (tokens, bytes) done in these seconds."""

    work: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    delay_s: float = 0.0  # 0 where the system does not tell

    @property
    def cpu_rate(self) -> float:
        """Units per second of CPU time."""
        return self.work / max(self.cpu_s, 1e-9)

    @property
    def wall_rate(self) -> float:
        """Units per second of wall time."""
        return self.work / max(self.wall_s, 1e-9)

    def add(self, other: Block) -> None:
        self.work += other.work
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s
        self.delay_s += other.delay_s


def run_queue_delay() -> float:
    """Seconds that this process's threads have waited for a core so far (Linux; 0 elsewhere)."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError):  # the thread has just ended, or the kernel keeps no such figures
            continue
    return total / 1e9


@contextmanager
def measured(work: float) -> Iterator[Block]:
    """Fills the block it yields when the body ends."""
    block = Block(work)
    delay, cpu, wall = run_queue_delay(), time.process_time(), time.perf_counter()
    yield block
    block.wall_s, block.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    block.delay_s = run_queue_delay() - delay


def interleave(rounds: int, sides: Mapping[str, Callable[[], Block]]) -> dict[str, list[Block]]:
    """Run the sides in turn, A B A B, so that what disturbs the machine falls on all of them alike."""
    blocks: dict[str, list[Block]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            blocks[name].append(run())
    return blocks


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles over the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else float("inf")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, by linear interpolation."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
