"""Whether a step is worth cutting into two groups. It is when it waits for the disk for long: the reads of one group
then go on behind the other's attention and experts. It costs, since weights that both groups use are read twice.
"""

from __future__ import annotations

LEAST = 4  # rows of a step: fewer share too much
AGAIN = 16  # steps after which one runs whole again, to see whether it still waits


class Split:
    """Learns from whole steps, apart by size (powers of two).

    Cutting a step hides about half of its wait, and adds half of its attention and a quarter of its experts' time
    (measured on a batch of 8 over 32 experts, where three experts of five are wanted by both halves).
    """

    def __init__(self, allowed: bool = True) -> None:
        self._allowed = allowed
        self._gain: dict[int, float] = {}  # size -> nanoseconds that cutting would save
        self._age: dict[int, int] = {}  # steps since the last whole one

    def pays(self, n: int) -> bool:
        """Whether the coming step of n rows is to be cut."""
        size = n.bit_length()
        return self._allowed and n >= LEAST and self._gain.get(size, 0.0) > 0 and self._age[size] < AGAIN

    def ran(self, n: int, groups: int, attention_ns: int, io_ns: int, experts_ns: int) -> None:
        """What a step took, and in how many groups it ran."""
        size = n.bit_length()
        if groups > 1:
            hardly = 8 * io_ns < attention_ns + experts_ns  # the reads may have ended for good: run whole, and see
            self._age[size] = AGAIN if hardly else self._age.get(size, 0) + 1
            return
        gain = io_ns / 2 - attention_ns / 2 - experts_ns / 4
        self._gain[size] = (self._gain.get(size, gain) + 3 * gain) / 4
        self._age[size] = 0
