"""The next token of each row, chosen on the device: kernels/cuda/sample.cu. The rules are those of engine/sampling.py.

The random number is the request's own, drawn on the host, so the same seed gives the same tokens wherever they are
chosen. Where the device cannot be sure of that (a draw within rounding of an edge) it says so, and the host chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .launch import Kernels
from .types import F32, I32

MOST_VOCAB = 1 << 19  # that many probabilities of 44 bits add up in 63
THREADS = 512


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen, see engine.sampling.Sampling; random: a number from 0 to below 1."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    random: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """In the order of sample.cu."""
        floor = log(self.min_p) if self.min_p > 0 else -np.inf
        return self.temperature, self.top_p, floor, self.repetition_penalty, self.random


class Chosen(NamedTuple):
    """Of each row: its token int32, whether that is the host's choice too, and the token's logit float32."""

    token: I32
    sure: NDArray[np.bool_]
    value: F32


class Chooser:
    """Room for `rows` choices a step out of `vocab` tokens, and for what the requests of `seats` have seen. ValueError
    for a vocabulary that the kernel's sums have no room for."""

    def __init__(self, kernels: Kernels, vocab: int, rows: int, seats: int) -> None:
        if vocab > MOST_VOCAB:
            raise ValueError(f"a vocabulary of {vocab} tokens is more than the {MOST_VOCAB} that are chosen from here")
        self._kernels, self._vocab, d = kernels, vocab, kernels.device
        self._seen = d.empty((seats, vocab), np.uint8)
        self._how, self._work = d.empty((rows, 5), np.float64), d.empty((rows, 2, vocab), np.int64)
        self._top_k, self._seat, self._token, self._sure = (d.empty((rows,), np.int32) for _ in range(4))
        self._value = d.empty((rows,), np.float32)
        self._most = rows

    def begin(self, seat: int, seen: Iterable[int]) -> None:
        """A request takes a seat: tokens that it has seen so far."""
        marks = np.zeros(self._vocab, np.uint8)
        marks[list(seen)] = 1
        self._kernels.device.write(self._seen[seat], marks)

    def choose(self, logits: Any, seats: list[int], draws: list[Draw]) -> Chosen:
        """One of each row of logits [n, V] on the device, at most `rows` in a launch. IndexError for a seat."""
        if not all(0 <= seat < len(self._seen) for seat in seats):
            raise IndexError(f"seats {seats}, there are {len(self._seen)}")
        parts = [self._some(logits[at : at + self._most], seats[at : at + self._most], draws[at : at + self._most])
                 for at in range(0, len(draws), self._most)]  # fmt: skip
        if not parts:
            return Chosen(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32))
        return Chosen(*(np.concatenate(same) for same in zip(*parts, strict=True)))

    def _some(self, logits: Any, seats: list[int], draws: list[Draw]) -> Chosen:
        device, n = self._kernels.device, len(draws)
        for target, values in ((self._how, [d.numbers for d in draws]), (self._top_k, [d.top_k for d in draws]),
                               (self._seat, seats)):  # fmt: skip
            device.write(target[:n], np.array(values, target.dtype))
        self._kernels("sample", (n, 1, 1), THREADS, logits, self._seen, self._how, self._top_k, self._seat, self._work,
                      self._token, self._sure, self._value, self._vocab, shared=8 * (THREADS + 1))  # fmt: skip
        token, sure, value = (device.read(a[:n]) for a in (self._token, self._sure, self._value))
        return Chosen(token, sure == 1, value)
