"""The frame arena: one lazily backed run of 64 KiB frames per expert that is in memory.

Address space is reserved for all experts of the model, so that the arena never moves when the budget changes; memory
is used only by the first `capacity` runs and given back to the system when the budget shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..memory import Region
from ..ops.layout import PAGE

POISON = 0xFF  # as fp16 scales these bytes are NaN, so that a stale read cannot pass unseen


class Above(Protocol):
    """A faster tier, which takes experts out of the frames: a card's memory."""

    def lock(self, memory: NDArray[np.uint8]) -> None:
        """Transfers may come from here; it stays where it is. ConfigError where it cannot."""

    def unlock(self, memory: NDArray[np.uint8]) -> None: ...

    def settle(self) -> None:
        """Return when no transfer reads the frames any more: they are about to change."""

    def lacking(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Those that are not there, and so are needed in memory; the others stay until the layer has computed."""

    def warm(self, layer: int, expert: int) -> None:
        """An expert that is in memory may be asked for soon."""

    def pin(self, key: int, pinned: bool) -> None:
        """An expert that every token uses, or does not any more."""

    def guesses(self, wanted: bool) -> None:
        """Whether there are guesses from now on."""


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
        self._above: Above | None = None

    def attach(self, above: Above) -> None:
        """A faster tier reads from here: usable frames are locked in memory, and change only when it has settled."""
        above.lock(self._usable)
        self._above = above

    @property
    def _usable(self) -> NDArray[np.uint8]:
        return self._region.data[: self.capacity * self.run_bytes]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free run; IndexError when there is none."""
        if self._above is not None:
            self._above.settle()
        return self._free.pop()

    def release(self, run: int) -> None:
        """Put a run back; nothing is cleared."""
        if self.poison:
            if self._above is not None:
                self._above.settle()
            self.view(run)[:] = bytes([POISON]) * self.run_bytes
        self._free.append(run)

    def view(self, run: int) -> memoryview:
        """The writable bytes of a run."""
        return self._bytes[run * self.run_bytes : (run + 1) * self.run_bytes]

    def of(self, run: int) -> NDArray[np.int32]:
        """The numbers of a run's frames, as they stand in the page table."""
        return self.numbers[run * self.pages : (run + 1) * self.pages]

    def move(self, source: int, target: int) -> None:
        if self._above is not None:
            self._above.settle()
        self.view(target)[:] = self.view(source)

    def resize(self, capacity: int, used: set[int]) -> None:
        """Set the number of usable runs; all runs in `used` lie below it. Memory above it returns to the system."""
        shrunk = capacity < self.capacity
        if self._above is not None:
            self._above.unlock(self._usable)
        self.capacity = capacity
        self._free = [run for run in range(capacity - 1, -1, -1) if run not in used]
        if shrunk:
            self._region.give_back(capacity * self.run_bytes, self.most * self.run_bytes)
        if self._above is not None:
            self._above.lock(self._usable)
