"""One step of the engine: plan rows, run them through the model, choose tokens, tell telemetry."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineClosed, RequestError, SlotsExhausted
from ..events import Phase, SequenceKind
from ..kv.cache import KVCache
from ..kv.persist import Persistence
from ..model.transformer import Transformer
from ..ops.types import NonFiniteLogits
from ..pager.lookahead import Lookahead
from ..pager.pager import Pager
from ..pager.policies import policy_name
from .adapt import BatchSize
from .batcher import Batcher
from .choosing import Choosing
from .logprobs import Logprobs
from .sampler import Sampler
from .sequence import SAID, Reason, Request, Token, Work, rows_of
from .settings import Board

PREFILL, DECODE = int(Phase.PREFILL), int(Phase.DECODE)  # NumPy takes plain integers ten times faster


class Stepper:
    """Advances all running requests. Called by one thread at a time; between two calls everything is consistent."""

    def __init__(self, board: Board, transformer: Transformer, pager: Pager, ahead: Lookahead, kv: KVCache,
                 telemetry: Any, sampler: Sampler, logprobs: Logprobs, choosing: Choosing,
                 persistence: Persistence | None = None) -> None:  # fmt: skip
        self._board, self.sampler, self.logprobs, self.choosing = board, sampler, logprobs, choosing
        self.config = board.config  # replaced as a whole at token boundaries
        self.transformer, self.pager, self.ahead, self.kv, self.telemetry = transformer, pager, ahead, kv, telemetry
        self.persistence = persistence
        self._first: tuple[NDArray[np.uint16], NDArray[np.float32]] | None = None  # of the running step's first row
        self.closed = False  # the backend is gone: no step may run
        self.batcher = Batcher()
        config = board.config
        self.batch = BatchSize(config.max_batch_size, config.batch_adapt_interval_ms, partial(telemetry.note, "batch"),
                               on_device=transformer.backend.name == "cuda")  # fmt: skip
        self.abandoned: deque[Request] = deque()  # appended to by any thread, even by a garbage collector
        self.steps = self.prefill_tokens = self.decode_tokens = self.started = self.finished = 0

    def due(self) -> bool:
        """Whether `boundary` has something to do."""
        return bool(self.abandoned) or self._board.changed

    def boundary(self) -> None:
        """Between two tokens: free what was abandoned, take over settings."""
        while self.abandoned:
            self.finish(self.abandoned.popleft(), Reason.CANCELLED)
        self.config, changed = self._board.take()
        if "expert_cache_bytes" in changed:
            budget = changed["expert_cache_bytes"]
            self.pager.resize(self.pager.default() if budget is None else budget)
            changed["expert_cache_bytes"] = self.pager.budget  # what is in force: at most all experts
        if "eviction_policy" in changed:
            self.pager.follow(changed["eviction_policy"])
            changed["eviction_policy"] = policy_name(changed["eviction_policy"])
        if "max_batch_size" in changed or "batch_adapt_interval_ms" in changed:
            self.batch.reset(self.config.max_batch_size, self.config.batch_adapt_interval_ms)
        if "prefetcher" in changed:
            self.ahead.follow(changed["prefetcher"])
            self.transformer.follow(self.ahead if self.ahead.active else None)
            changed["prefetcher"] = policy_name(changed["prefetcher"] or "none")
        if changed:
            self.telemetry.note("settings", changed)

    def step(self, everybody: bool = False) -> bool:
        """One pass; False when there was nothing to do. What stops one request is kept in its `error`."""
        if self.closed:
            raise EngineClosed("the engine is closed")
        most = self.batch.now(self.batcher)
        for request in self.batcher.admit(most):
            self._seat(request)
        works, held = self.batcher.plan(self.config.prefill_chunk, most, everybody)
        if not works:
            return False
        self.batch.held += held
        begin, before = clock(), self._counts()
        if begin >= self.sampler.due_ns:
            self.sampler.sample(self.telemetry, begin)
        self.begin(works)
        self._first = None
        try:
            self.transformer.forward(*self.fill(works))
            head = clock()
            tokens = self.choosing.choose(self.transformer, works, self.config.telemetry_top_logprobs > 0)
        except (NonFiniteLogits, SlotsExhausted) as error:
            self._stop_one(works, error)
            return True
        except BaseException:
            self._rewind(works)
            raise
        end = clock()
        self._tell(works, tokens, begin, head, end, before)
        if self.config.telemetry_top_logprobs:
            self.logprobs.tell(self.telemetry, self.config.telemetry_top_logprobs, works, tokens, self.transformer.rows)
        self._commit(works, tokens, begin, end)
        return True

    def begin(self, works: Sequence[Work]) -> None:
        """Tell the pager what kind of step comes."""
        decode = all(work.start >= work.sequence.prompt for work in works)
        self.pager.begin(self.steps, decode, max(work.start + work.count for work in works))

    def fill(self, works: Sequence[Work]) -> tuple[int, list[int]]:
        """Write the rows of a step; returns their number and the seat of each."""
        rows, n, seats = self.transformer.rows, 0, []
        for work in works:
            request, start, count = work.sequence, work.start, work.count
            if count == 1:
                rows.token[n], rows.position[n], rows.seat[n] = request.ids[start], start, request.seat
            else:
                to = slice(n, n + count)
                rows.token[to] = request.ids[start : start + count]
                rows.position[to] = range(start, start + count)
                rows.seat[to] = request.seat
            seats += [request.seat] * count
            n += count
        return n, seats

    def finish(self, request: Request, reason: Reason, error: Exception | None = None) -> None:
        """End a request and give back its seat and slots; nothing happens when it has ended already."""
        if request.over is not None:
            return
        request.over, request.error = reason, error
        self.batcher.remove(request)
        if request.seat >= 0:
            if self.persistence is not None:
                self.persistence.end(request.seat, request.ids, request.done, reason is not Reason.ERROR)
            self.kv.close(request.seat)
            request.seat = -1
            if request.number == 0:
                return  # an evaluation, no sequence that anybody watches
            self.finished += 1
            self.telemetry.sequence(clock(), SequenceKind.FINISH, request.number, request.prompt, int(reason))
            if not self.batcher.busy:
                self.sampler.sample(self.telemetry, clock(), last=True)

    def _seat(self, request: Request) -> None:
        request.seat = self.kv.open(request.number)
        if self.persistence is not None:
            request.done = self.persistence.begin(request.seat, request.ids)
        self.started += 1
        self.telemetry.sequence(clock(), SequenceKind.START, request.number, request.prompt)

    def _rewind(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.sequence.seat >= 0:
                self.kv.rewind(work.sequence.seat, work.sequence.done)

    def _stop_one(self, works: Sequence[Work], error: NonFiniteLogits | SlotsExhausted) -> None:
        """One request of the step cannot go on: it ends with its error, and the others do the step again."""
        if isinstance(error, SlotsExhausted):
            self.finish(next(work.sequence for work in works if work.sequence.seat == error.seat), Reason.ERROR, error)
        else:
            row = error.row
            for work in works:
                if row < work.count:
                    self.finish(work.sequence, Reason.ERROR, self.not_finite(work, error.layer, row))
                    break
                row -= work.count
        self._rewind(works)

    @staticmethod
    def not_finite(work: Work, layer: int, row: int) -> RequestError:
        """What to say of the row-th row of some work."""
        position = work.start + row
        where = f"at position {position} (token id {work.sequence.ids[position]})"
        return RequestError(
            f"router logits of layer {layer} are not finite {where}: the weights or this input overflow"
        )

    def _commit(self, works: Sequence[Work], tokens: Sequence[tuple[int, float] | None], begin: int, end: int) -> None:
        row = -1
        self.steps += 1
        for work, token in zip(works, tokens, strict=True):
            request = work.sequence
            row += work.count
            request.done = work.start + work.count
            if work.start >= request.prompt:
                self.decode_tokens += 1
            else:
                self.prefill_tokens += work.count
            if self.persistence is not None:
                self.persistence.grown(request.seat, request.ids, request.done, request.prompt)
            if token is None:
                continue
            id, logprob = token
            if logprob != logprob:
                position = request.done - 1
                error = RequestError(
                    f"the model's logits are not finite at position {position} (token id {request.ids[position]})"
                )
                self.finish(request, Reason.ERROR, error)
                continue
            index = request.generated
            text, reason = request.take(id)
            latency = (end - (begin if index else request.started_ns)) / 1e6
            experts, weights = self._kept(row)
            said = None if reason is None else SAID[reason]
            request.ready.append(Token(id, text, logprob, latency, experts, weights, index, said))
            if text:
                self.telemetry.text(request.number, request.prompt + index, text)
            if reason is not None:
                self.finish(request, reason)

    def _kept(self, row: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        """The experts and weights [L, k] of a row of the step, read-only: tokens and telemetry share them."""
        if self._first is not None and row == 0:
            return self._first
        experts, weights = self.transformer.route[:, row].astype(np.uint16), self.transformer.gate[:, row].copy()
        experts.flags.writeable = weights.flags.writeable = False
        if row == 0:
            self._first = experts, weights
        return experts, weights

    def _counts(self) -> tuple[int, int, int, int]:
        p = self.pager
        return p.faults, p.hits, p.evictions, p.all_bytes

    def _tell(self, works: Sequence[Work], tokens: Sequence[tuple[int, float] | None], begin: int, head: int, end: int,
              before: tuple[int, int, int, int]) -> None:  # fmt: skip
        if not self.telemetry.enabled:
            return
        t, n, now = self.transformer, rows_of(works), self._counts()
        # what a kernel says it waited comes from another clock than what its stage took
        inside = t.attention_ns, t.router_ns, t.dispatch_ns, t.io_ns, t.experts_ns
        times = end - begin, *(max(0, ns) for ns in inside), end - head
        counts = now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]
        if n == 1:
            work, chosen = works[0], tokens[0]
            phase = DECODE if work.start >= work.sequence.prompt else PREFILL
            id, slots = -1 if chosen is None else chosen[0], self.kv.slots_of_first_row()
            self.telemetry.one(end, work.sequence.number, work.start, id, phase, *times, *counts, *self._kept(0), slots)
            return
        numbers: list[int] = []
        ids: list[int] = []
        phases: list[int] = []
        for work, chosen in zip(works, tokens, strict=True):
            numbers += [work.sequence.number] * work.count
            ids += [-1] * (work.count - 1) + [-1 if chosen is None else chosen[0]]
            phases += [DECODE if work.start >= work.sequence.prompt else PREFILL] * work.count
        position, route, gate = t.rows.position[:n], t.route[:, :n].swapaxes(0, 1), t.gate[:, :n].swapaxes(0, 1)
        slot = self.kv.slots_of_rows()
        self.telemetry.step(end, numbers, position, ids, phases, *times, *counts, route, gate, slot)
