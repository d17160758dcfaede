"""Whether a step is worth cutting into two groups: only where it waits for the disk, and where it has proved so.

The reads of one group then go on behind the other's attention and experts; but weights that both groups use are read
twice, and a disk that was busy all the time anyway gains nothing. Which of it wins is measured, not foretold.
"""

from __future__ import annotations

LEAST = 4  # rows of a step: fewer share too much
TRIES = 4  # steps of each way before they are compared, in turn, since the first ones may find cold weights
AGAIN = 16  # steps after which one runs the other way, to see whether that is still the slower one
SHARE = 8  # what a step counts for later: one part in so many


class Split:
    """Learns what steps take both ways, apart by size (powers of two)."""

    def __init__(self, allowed: bool = True) -> None:
        self._allowed = allowed
        self._ways: dict[int, tuple[_Way, _Way]] = {}  # size -> whole, cut
        self._waits: dict[int, bool] = {}  # size -> whether its last step waited for an eighth of its time or more

    def pays(self, n: int) -> bool:
        """Whether the coming step of n rows is to be cut."""
        size = n.bit_length()
        if not self._allowed or n < LEAST or not self._waits.get(size):
            return False
        whole, cut = self._ways[size]
        if min(whole.steps, cut.steps) < TRIES:
            return cut.steps < whole.steps
        better, other = (cut, whole) if cut.took < whole.took else (whole, cut)
        return (better if other.age < AGAIN else other) is cut

    def ran(self, n: int, groups: int, took: int, waited: int) -> None:
        """What a step took in all, and waited for reads of that, both in ns, and in how many groups it ran."""
        size = n.bit_length()
        self._waits[size] = 8 * waited >= took
        ways = self._ways.setdefault(size, (_Way(), _Way()))
        ways[groups > 1].ran(took)
        ways[groups == 1].age += 1


class _Way:
    def __init__(self) -> None:
        self.steps = self.age = 0  # how many ran this way, and how many did not since the last that did
        self.took = 0.0  # ns of a step, lately; the second one replaces the first, which may be cold

    def ran(self, took: int) -> None:
        self.steps, self.age = self.steps + 1, 0
        self.took += (took - self.took) / min(max(1, self.steps - 1), SHARE)
