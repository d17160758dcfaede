"""Two rings of a step's rows: attention and router, the producer, fill one while the experts, the consumer, empty the
other.

A ring holds units, runs of rows of one layer. Rows stay where they are and are read there, by offset and index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

WATERMARK = 0.75
AHEAD = 2  # units that the producer may be ahead of the consumer
Group = tuple[int, int]  # (first row, number of rows)


class Rows(Protocol):
    """What a ring holds: n rows from `at` on."""

    at: int
    n: int


T = TypeVar("T", bound=Rows)


class Ring(Generic[T]):
    """Room for `size` rows, a power of two; first in, first out."""

    def __init__(self) -> None:
        self.size, self.fill = 1, 0
        self.units: deque[T] = deque()
        self.puts, self.filled = 0, 0.0  # units that came in, and the share of the ring that was full then, summed


class Rings(Generic[T]):
    """Ring A and ring B. The producer puts one unit into each in turn, the consumer takes them in the same order.

    size: rows of a ring, None: chosen for each step. watermark: the fill at which the producer moves on to the other
    ring, so a group of rows is at most that large; with half of a ring units are smaller, which helps where experts
    arrive at very different times.
    """

    def __init__(self, size: int | None, watermark: float | None) -> None:
        self.size, self.watermark = size, WATERMARK if watermark is None else watermark
        self._pair: tuple[Ring[T], Ring[T]] = (Ring(), Ring())
        self._in = self._out = 0  # which ring is next
        self.units = self.groups = self.split_steps = self.switches = self.stalls = self.fill_most = 0
        self.share_most = 0.0

    def deal(self, n: int, pays: bool) -> Sequence[Group]:
        """The groups of a step's n rows, as even as can be: as many as rings of this size need; without a size two
        where splitting `pays`, else one. Both rings are empty between steps."""
        size, groups = self.size, 2 if pays and n > 1 else 1
        if size is None:
            size = 1 << max(0, (int(-(-n // groups) / self.watermark - 1e-9)).bit_length())
        else:
            groups = -(-n // max(1, int(size * self.watermark)))
        for ring in self._pair:
            ring.size = size
        self.groups += groups
        self.split_steps += groups > 1
        edges = [n * i // groups for i in range(groups + 1)]
        return [(a, b - a) for a, b in pairwise(edges)]

    def __len__(self) -> int:
        """Units that were produced and not consumed yet."""
        return len(self._pair[0].units) + len(self._pair[1].units)

    def full(self, rows: int) -> bool:
        """Whether the producer must wait before so many rows: too far ahead, or no room in the ring that is next."""
        ring = self._pair[self._in]
        return len(self) >= AHEAD or ring.fill + rows > ring.size

    def holds(self, at: int) -> bool:
        """Whether a unit of the rows from `at` on waits for its consumer."""
        return any(unit.at == at for ring in self._pair for unit in ring.units)

    def put(self, unit: T) -> None:
        ring, other = self._pair[self._in], self._pair[self._in ^ 1]
        ring.units.append(unit)
        ring.fill = fill = ring.fill + unit.n
        share = fill / ring.size
        ring.puts, ring.filled = ring.puts + 1, ring.filled + share
        self._in ^= 1
        self.units += 1
        if other.units:  # while the consumer is busy with the other
            self.switches += 1
        if share > self.share_most:
            self.share_most = share
        if fill > self.fill_most:
            self.fill_most = fill

    def take(self) -> T:
        """The oldest unit."""
        ring = self._pair[self._out]
        unit = ring.units.popleft()
        ring.fill -= unit.n
        self._out ^= 1
        return unit

    def clear(self) -> list[T]:
        """A step was given up: both rings are empty again. What was in them."""
        return [self.take() for _ in range(len(self))]

    def counters(self) -> dict[str, int | float]:
        """Sizes and fills in rows; fill_share_most of a ring's size; stalls: the producer waited for the consumer;
        ring_x_filled over ring_x_units: how full the ring was when a unit had come in, on average."""
        a, b = self._pair
        return {
            "ring_size": a.size,
            "ring_a_fill": a.fill,
            "ring_b_fill": b.fill,
            "ring_a_units": a.puts,
            "ring_b_units": b.puts,
            "ring_a_filled": a.filled,
            "ring_b_filled": b.filled,
            "watermark": self.watermark,
            "ring_fill_most": self.fill_most,
            "ring_fill_share_most": self.share_most,
            "ring_switches": self.switches,
            "units": self.units,
            "groups": self.groups,
            "split_steps": self.split_steps,
            "stalls": self.stalls,
        }
