"""Logits and perplexity of given ids: the same steps as generation, without sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineClosed, RequestError
from ..ops.types import NonFiniteLogits, Rows
from .sequence import Request, Work
from .step import Stepper

Turn = Callable[[], AbstractContextManager[Any]]
Drop = Callable[[Request], None]  # frees what a request holds, as soon as nobody steps
Sink = Callable[[int, int, Rows], None]  # (first position, count, rows whose .logits[:count] are theirs)


def forward(stepper: Stepper, turn: Turn, drop: Drop, ids: Sequence[int], sink: Sink,
            around: AbstractContextManager[None] | None = None) -> None:  # fmt: skip
    """Run ids through the model in chunks, between which other requests may advance; gives its KV slots back.

    around: entered for each chunk, and left before anybody else's step.
    """
    request = Request(0, list(ids), len(ids), 0, None, None, None, ())  # type: ignore[arg-type]
    with turn():
        if stepper.closed:
            raise EngineClosed("the engine is closed")
        request.seat = stepper.kv.open(0)
    try:
        while request.done < request.prompt:
            with turn(), around or nullcontext():
                if stepper.closed:
                    raise EngineClosed("the engine is closed")
                work = Work(
                    request, request.done, min(stepper.config.prefill_chunk, request.prompt - request.done), False
                )
                stepper.begin([work])
                try:
                    stepper.transformer.forward(*stepper.fill([work]))
                except NonFiniteLogits as error:
                    raise stepper.not_finite(work, error.layer, error.row) from None
                except BaseException:  # an interrupt, say, which may only mean that the chunk is done again
                    stepper.kv.rewind(request.seat, request.done)
                    raise
                stepper.transformer.head(range(work.count))
                stepper.prefill_tokens += work.count
                stepper.steps += 1
                sink(work.start, work.count, stepper.transformer.rows)
                request.done += work.count
    finally:
        drop(request)


def logits(stepper: Stepper, turn: Turn, drop: Drop, ids: Sequence[int], vocab: int) -> NDArray[np.float32]:
    """float32 [T, V]: row t holds the logits after ids[: t + 1]."""
    out = np.empty((len(ids), vocab), np.float32)

    def keep(first: int, count: int, rows: Rows) -> None:
        out[first : first + count] = rows.logits[:count]

    forward(stepper, turn, drop, ids, keep)
    return out


def perplexity(stepper: Stepper, turn: Turn, drop: Drop, ids: Sequence[int], bos: int | None, positions: int) -> float:
    """exp of the mean negative log-likelihood (natural log) of ids[1:], each predicted from what is before it.

    Longer texts than the context are read in windows of `positions` that overlap by half; a token counts once, in the
    first window that holds it. Later windows start with the first id again where that is the start token.
    """
    if len(ids) < 2:
        raise RequestError(f"perplexity needs a text of at least 2 tokens, this one has {len(ids)}")
    lead = [ids[0]] if ids[0] == bos else []
    total, scored = 0.0, 1  # the first id is predicted from nothing
    while scored < len(ids):
        start = max(0, scored - (positions - len(lead)) // 2) if scored > 1 else 0
        head = lead if start else []
        window = head + list(ids[start : start + positions - len(head)])
        skip = scored - start + len(head)  # first place of the window that still counts

        def add(first: int, count: int, rows: Rows, window: list[int] = window, skip: int = skip) -> None:
            nonlocal total
            for i in range(count):
                place = first + i + 1
                if skip <= place < len(window):
                    total += float(rows.logsumexp[i]) - float(rows.logits[i, window[place]])

        forward(stepper, turn, drop, window, add)
        scored = start + len(window) - len(head)
    return math.exp(total / (len(ids) - 1))
