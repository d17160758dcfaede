"""Which expert lies where in the device's frames, and who leaves: bookkeeping alone, no memory is touched here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

TIER_COUNTERS = ("hits", "faults", "evictions", "ahead", "ahead_hits", "ahead_wasted")


class Tier:
    """`capacity` runs of frames, one expert each, by key (layer * experts + expert).

    The expert that was used longest ago leaves, pinned ones last. Where there are guesses, `spare` runs are for them:
    they replace nothing but older guesses and what lies free. leaves: told of each key that goes.
    """

    def __init__(self, capacity: int, spare: int, leaves: Callable[[int], None] = lambda key: None) -> None:
        self._leaves = leaves
        self.capacity, self.keep, self._spare = capacity, capacity, spare
        self.held: OrderedDict[int, int] = OrderedDict()  # key -> run, used longest ago first
        self.guessed: OrderedDict[int, int] = OrderedDict()  # the same of what nobody has asked for yet
        self.pinned: set[int] = set()
        self._free = list(range(capacity - 1, -1, -1))
        self.hits = self.faults = self.evictions = self.ahead = self.ahead_hits = self.ahead_wasted = 0

    def find(self, key: int, busy: Container[int]) -> int | None:
        """The run of an expert that is asked for now; a guess that came true is held from here on."""
        run = self.held.get(key)
        if run is not None:
            self.held.move_to_end(key)
            self.hits += 1
        elif (run := self.guessed.pop(key, None)) is not None:
            self._make_room(busy)
            self.held[key] = run
            self.hits += 1
            self.ahead_hits += 1
        return run

    def admit(self, key: int, busy: Container[int]) -> int:
        """A run for an expert that is not here; LookupError where everything is busy."""
        self._make_room(busy)
        run = self.held[key] = self._free.pop() if self._free else self._oldest_guess()
        self.faults += 1
        return run

    def guess(self, key: int) -> int | None:
        """A run for an expert that may be asked for; None where it is here already, or nothing may make room."""
        if key in self.held or key in self.guessed or self.keep == self.capacity:
            return None
        run = self.guessed[key] = self._free.pop() if self._free else self._oldest_guess()
        self.ahead += 1
        return run

    def forget(self, key: int) -> None:
        """An expert did not come."""
        self._free.append((self.held if key in self.held else self.guessed).pop(key))
        self._leaves(key)

    def guesses(self, wanted: bool) -> None:
        """From now on some runs are for guesses, or none."""
        self.keep = self.capacity - (self._spare if wanted else 0)
        if not wanted:
            self.ahead_wasted += len(self.guessed)
            self._free += self.guessed.values()
            for key in self.guessed:
                self._leaves(key)
            self.guessed.clear()

    def pin(self, key: int, pinned: bool) -> None:
        """Let an expert stay while others can leave, or not any more."""
        if pinned:
            self.pinned.add(key)
        else:
            self.pinned.discard(key)

    def _oldest_guess(self) -> int:
        self.ahead_wasted += 1
        key, run = self.guessed.popitem(last=False)
        self._leaves(key)
        return run

    def _make_room(self, busy: Container[int]) -> None:
        while len(self.held) >= self.keep:
            able = [key for key in self.held if key not in busy]
            if not able:
                raise LookupError("all experts on the device are in use")
            key = next((k for k in able if k not in self.pinned), able[0])
            self._free.append(self.held.pop(key))
            self._leaves(key)
            self.evictions += 1

    def counters(self) -> dict[str, int]:
        """Experts: found on the device, sent because they were not, thrown out; sent ahead, and what became of it."""
        now = {"resident": len(self.held), "capacity": self.capacity, "pinned": len(self.pinned & self.held.keys())}
        return {f"experts_{name}": getattr(self, name) for name in TIER_COUNTERS} | {
            f"experts_{name}": value for name, value in now.items()
        }
