"""What a layer's unit asked the pager for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .transfer import Flight


@dataclass
class Ticket:
    """What was asked for and is held until it is given back: nobody throws it out, whoever asks for what."""

    layer: int
    wanted: Sequence[int]
    asked_ns: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)  # expert -> its read, where it was not in memory
    guessed: set[int] = field(default_factory=set)  # of those, experts that had landed by then
    reads: list[Flight] = field(default_factory=list)  # of these, the reads that had not begun as guesses
    taken: set[int] = field(default_factory=set)  # experts whose read had begun as a guess
