"""The frame arena: one lazily backed run of 64 KiB frames per expert that is in memory.

Address space is reserved for all experts of the model, so that the arena never moves when the budget changes; memory
is used only by the first `capacity` runs and given back to the system when the budget shrinks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..memory import Region
from ..ops.layout import PAGE

POISON = 0xFF  # as fp16 scales these bytes are NaN, so that a stale read cannot pass unseen


class Frames:
    """Runs of `pages` frames each. A run index r covers frames r * pages to (r + 1) * pages - 1."""

    def __init__(self, pages: int, most: int, capacity: int, poison: bool = False) -> None:
        """most: runs that address space is reserved for; capacity: runs that may be in use now."""
        self.pages, self.most, self.capacity, self.poison = pages, most, capacity, poison
        self.run_bytes = pages * PAGE
        self._region = Region(most * self.run_bytes, huge=True)
        self.array: NDArray[np.uint8] = self._region.data.reshape(most * pages, PAGE)
        self._bytes = memoryview(self._region.data)  # type: ignore[arg-type]
        self.numbers: NDArray[np.int32] = np.arange(most * pages, dtype=np.int32)
        self._free = list(range(capacity - 1, -1, -1))  # lowest run on top: memory stays dense

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free run; IndexError when there is none."""
        return self._free.pop()

    def release(self, run: int) -> None:
        """Put a run back; nothing is cleared."""
        if self.poison:
            self.view(run)[:] = bytes([POISON]) * self.run_bytes
        self._free.append(run)

    def view(self, run: int) -> memoryview:
        """The writable bytes of a run."""
        return self._bytes[run * self.run_bytes : (run + 1) * self.run_bytes]

    def of(self, run: int) -> NDArray[np.int32]:
        """The numbers of a run's frames, as they stand in the page table."""
        return self.numbers[run * self.pages : (run + 1) * self.pages]

    def move(self, source: int, target: int) -> None:
        self.view(target)[:] = self.view(source)

    def resize(self, capacity: int, used: set[int]) -> None:
        """Set the number of usable runs; all runs in `used` lie below it. Memory above it returns to the system."""
        shrunk = capacity < self.capacity
        self.capacity = capacity
        self._free = [run for run in range(capacity - 1, -1, -1) if run not in used]
        if shrunk:
            self._region.give_back(capacity * self.run_bytes, self.most * self.run_bytes)
