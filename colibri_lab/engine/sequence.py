"""One request on its way: its ids, its seat, its text, and the tokens that wait to be fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from time import perf_counter_ns as clock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .sampling import Sampler
from .stop import StopTexts


class TextStream(Protocol):
    """Ids in, text out; never splits a character."""

    def push(self, id: int) -> str: ...

    def flush(self) -> str: ...


class Reason(IntEnum):
    """Why a sequence ended; the value is the `detail` of its FINISH event."""

    LENGTH = 0
    END_TOKEN = 1
    STOP_TEXT = 2
    CANCELLED = 3
    ERROR = 4


SAID = {Reason.LENGTH: "length", Reason.END_TOKEN: "stop", Reason.STOP_TEXT: "stop"}


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """One generated token.

    text: what may be shown now; it lags behind where a character or a possible stop text is incomplete; "" for an end
    token. logprob: natural log of its probability under the model's own distribution. latency_ms: time of the step
    that made it; for the first token from the request's start. experts uint16 and weights float32 [L, k], best first
    (65535 and 0 in dense layers). finish_reason: None, or on the last token "stop" or "length".
    """

    id: int
    text: str
    logprob: float
    latency_ms: float
    experts: NDArray[np.uint16]
    weights: NDArray[np.float32]
    index: int
    finish_reason: str | None = None


@dataclass(eq=False)
class Request:
    """State of one request; only the thread that steps the engine changes it, bar `cancelled`."""

    number: int
    ids: list[int]  # prompt, then generated
    prompt: int  # tokens of the prompt
    limit: int  # tokens to generate at most
    sampler: Sampler
    stops: StopTexts
    stream: TextStream
    ends: Container[int]
    seat: int = -1  # -1: not running
    done: int = 0  # positions whose keys and values are stored
    ready: deque[Token] = field(default_factory=deque)
    over: Reason | None = None
    error: Exception | None = None
    entered: bool = False
    cancelled: bool = False
    started_ns: int = field(default_factory=clock)

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt

    def take(self, id: int) -> tuple[str, Reason | None]:
        """A new token: the text that may be shown, and the reason if it is the last."""
        self.ids.append(id)
        if id in self.ends:
            return self._rest(""), Reason.END_TOKEN
        text, stopped = self.stops.push(self.stream.push(id))
        if stopped:
            return text, Reason.STOP_TEXT
        if self.generated >= self.limit:
            return self._rest(text), Reason.LENGTH
        return text, None

    def _rest(self, text: str) -> str:
        more, stopped = self.stops.push(self.stream.flush())
        return text + more + ("" if stopped else self.stops.flush())


@dataclass(frozen=True, slots=True)
class Work:
    """`count` rows of a sequence from position `start` on. last: the final row's logits give a token."""

    sequence: Request
    start: int
    count: int
    last: bool


def rows_of(works: Sequence[Work]) -> int:
    return sum(work.count for work in works)
