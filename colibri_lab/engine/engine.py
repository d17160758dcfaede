"""The engine as people use it: load, generate, look, change, close."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns as clock
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..config import Config
from ..errors import EngineClosed, RequestError
from . import evaluate, show
from .follow import Followed, follow
from .interrupt import Shield
from .loading import Parts, build, settle
from .logprobs import Logprobs
from .pipeline import Pipeline
from .request import Asked, prepare, prompt_ids, text_or_ids
from .sampler import Sampler
from .sequence import Reason, Request, Token
from .settings import Board, Settings
from .snapshot import snapshot
from .step import Stepper
from .turn import Turn

if TYPE_CHECKING:
    from .probe import Probe
    from .session import Session


class Engine:
    """A model ready to generate. Make it with `Engine.load`; usable from several threads; close it, or use `with`."""

    def __init__(self, parts: Parts) -> None:
        self._closed = True  # until all is there, so that __del__ after a failed __init__ does nothing
        self._parts = parts
        p = parts
        limits = {"max_batch_size": p.config.max_batch_size, "prefill_chunk": p.config.prefill_chunk}
        self._board = Board(p.config, limits, p.pager.check)
        sampler = Sampler(weakref.WeakMethod(self.counters), partial(show.warnings, p))
        self._stepper = Stepper(self._board, p.transformer, p.pager, p.ahead, p.kv, p.telemetry, sampler,
                                Logprobs(p.tokenizer.decode), p.choosing, p.persistence)  # fmt: skip
        self._turn = Turn(Shield(p.transformer.pressed), self._stepper.boundary, self._stepper.due)
        self._one_evaluation = threading.Lock()  # there is one spare seat for logits and perplexity
        self._numbers = iter(range(1, 1 << 32))
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        self.telemetry = p.telemetry
        self.telemetry.note("model", self.describe())

    @classmethod
    def load(cls, path_or_config: str | Path | Config, **overrides: Any) -> Engine:
        """Load a model folder (Hugging Face or converted), a .colibri file, a config.yaml, or a Config.

        Overrides are config keys. A Hugging Face folder is converted into the cache folder on first use.
        Raises ConfigError, ModelError, PagerError.
        """
        return cls(build(settle(path_or_config, overrides)))

    def generate(self, prompt: str | Sequence[int], max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0,
                 top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None,
                 stop: str | Sequence[str] | None = None) -> Iterator[Token]:  # fmt: skip
        """Tokens one by one; nothing is computed before the first is asked for; closing the iterator frees everything.

        Wrong arguments and a prompt longer than the context raise RequestError at once. What stops this request later
        (no KV slot left, logits not finite) is raised in place of the next token. See Sampling for the other arguments.
        """
        asked = Asked(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
        return self.begin(prompt, asked)[1]

    def begin(self, prompt: str | Sequence[int], asked: Asked) -> tuple[Request, Iterator[Token]]:
        """The request behind `generate` and its iterator; setting `request.cancelled` ends it at the next step."""
        request = prepare(self._parts, prompt, asked, next(self._numbers))
        return request, self._tokens(request)

    def generate_batch(self, prompts: Sequence[str | Sequence[int]], **same: Any) -> Iterator[tuple[int, Token]]:
        """(index of the prompt, token) of several requests that run together, as they come; arguments of `generate`.

        The error of one request is raised after the others have ended.
        """
        asked = Asked(**same)
        requests = [prepare(self._parts, prompt, asked, next(self._numbers)) for prompt in prompts]
        return self._batch(requests)

    def logits(self, ids: str | Sequence[int]) -> NDArray[np.float32]:
        """float32 [T, vocabulary] for T token ids (or a text's): row t is what the model says after ids[: t + 1]."""
        self._check_open()
        ids = prompt_ids(self._parts, text_or_ids(self._parts, ids))
        with self._one_evaluation:
            return evaluate.logits(self._stepper, self._turn.take, self._abandon, ids, self._parts.file.spec.vocab_size)

    def follow(self, ids: str | Sequence[int]) -> Followed:
        """Copies of the arrays that the last of some ids (or of a text's) met at each station; samples nothing."""
        self._check_open()
        p = self._parts
        with self._one_evaluation:
            return follow(self._stepper, self._turn.take, self._abandon, prompt_ids(p, text_or_ids(p, ids)))

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean negative log-likelihood per token; long texts in half-overlapping windows of the context."""
        self._check_open()
        p = self._parts
        ids = text_or_ids(p, text)
        ids = ids if isinstance(text, str) else prompt_ids(p, ids, any_length=True)
        with self._one_evaluation:
            turn = self._stepper, self._turn.take, self._abandon
            return evaluate.perplexity(*turn, ids, p.tokenizer.bos, p.max_positions)

    @property
    def settings(self) -> Settings:
        """Live settings: `engine.settings.expert_cache_bytes = "8MiB"` acts before the next token."""
        return Settings(self._board, self._turn.sweep)

    def counters(self) -> dict[str, dict[str, int | float]]:
        """What has been done so far: counts, bytes and seconds, by system."""
        p, s = self._parts, self._stepper
        dispatch = p.dispatcher.counters()
        return {
            "engine": {
                "steps": s.steps,
                "prefill_tokens": s.prefill_tokens,
                "decode_tokens": s.decode_tokens,
                "sequences_started": s.started,
                "sequences_finished": s.finished,
                "running": len(s.batcher.running),
                "waiting": len(s.batcher.waiting) + len(s.batcher.incoming),
            },
            "pager": p.pager.counters() | p.ahead.counters(),
            "kv": p.kv.counters(),
            "persistence": p.persistence.counters() if p.persistence else {},
            "router": {"selections": dispatch["rows"] // max(1, p.top_k), **show.routing_counts(p)},
            "dispatch": dispatch | (p.transformer.counters() if isinstance(p.transformer, Pipeline) else {}),
            "batch": s.batch.counters(),
            **show.machine_counts(p),
            "telemetry": p.telemetry.counters(),
        }

    def budget_bytes(self) -> int:
        """Of the expert cache, as it is in force."""
        return self._parts.pager.budget

    def describe(self) -> dict[str, Any]:
        """What is loaded and how: strict JSON values."""
        return show.describe(self._parts, self._board.config) | {"batch_follows": self._stepper.batch.describe()}

    def pages(self, layer: int, expert: int) -> list[int]:
        """The frame that each page of an expert lies in; negative where it is on disk or on its way."""
        return list(self._parts.pager.table[layer, expert].tolist())

    def watch(self, probe: Probe) -> None:
        """From the next token on the batch size follows these readings, see `batch_adapt_interval_ms`."""
        with self._turn.take():
            self._stepper.batch.follow(probe)

    def snapshot(self) -> None:
        """Tell telemetry what is in memory now, between two steps: so a board or recording may begin at any time."""
        with self._turn.take():
            for value in snapshot(self._parts, self._stepper.batcher.running):
                self.telemetry.note("snapshot", value)

    def session(self) -> Session:
        """A worker thread that generates in the background, for the lab."""
        from .session import Session

        session = Session(self)
        self._sessions.add(session)
        return session

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: encode, decode, stream, bos, eos."""
        return self._parts.tokenizer

    @property
    def spec(self) -> Any:
        """Facts of the model (model.spec.ModelSpec)."""
        return self._parts.file.spec

    def close(self) -> None:
        """Stop sessions and threads, close the file; idempotent. Iterators still open and settings written afterwards
        raise EngineClosed."""
        if self._closed:
            return
        for session in list(self._sessions):
            session.close()
        with self._turn.take():
            if self._closed:
                return
            self._closed = self._stepper.closed = self._board.closed = True
            batcher = self._stepper.batcher
            for request in [*batcher.running, *batcher.waiting, *batcher.incoming]:
                self._stepper.finish(request, Reason.CANCELLED)
            p = self._parts
            if p.persistence is not None:
                p.persistence.close()
            p.backend.close()
            p.pager.close()
            p.file.close()
            p.host.restore()
            self._stepper.batch.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be copied or pickled: it has threads and open files; load the model again")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self._turn.taken():
            self.close()

    def __repr__(self) -> str:
        return show.line(self.describe())

    def _repr_html_(self) -> str:
        return show.html(self.describe(), self.counters())

    def _tokens(self, request: Request) -> Iterator[Token]:
        last = -math.inf
        try:
            while (token := self._next(request)) is not None:
                last = self._wait(request, last)
                yield token
        finally:
            self._abandon(request)

    def _batch(self, requests: list[Request]) -> Iterator[tuple[int, Token]]:
        error: Exception | None = None
        last = dict.fromkeys(range(len(requests)), -math.inf)
        try:
            for request in requests:
                self._enter(request)
            while last:
                for i in list(last):
                    try:
                        token = self._next(requests[i])
                    except RequestError as failed:
                        error, token = error or failed, None
                    if token is None:
                        del last[i]
                        continue
                    last[i] = self._wait(requests[i], last[i])
                    yield i, token
        finally:
            for request in requests:
                self._abandon(request)
        if error is not None:
            raise error

    def _enter(self, request: Request) -> None:
        if request.limit == 0:
            request.over = Reason.LENGTH
        elif not request.entered:
            request.entered, request.started_ns = True, clock()
            self._stepper.batcher.incoming.append(request)

    def _next(self, request: Request) -> Token | None:
        """The request's next token, stepping the engine until there is one; None when it has ended."""
        self._enter(request)
        while not request.ready:
            if request.error is not None:
                raise request.error
            self._check_open()
            if request.over is not None or request.cancelled:
                return None
            self._turn.attempt(lambda: self._step_for(request), 0.002)  # another thread may step for it too: look again
        return request.ready.popleft()

    def _step_for(self, request: Request) -> None:
        if not request.ready and request.over is None:
            self._stepper.step(everybody=request.seat < 0)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _abandon(self, request: Request) -> None:
        request.cancelled = True
        if request.over is None:
            self._stepper.abandoned.append(request)
            self._turn.sweep()

    def _wait(self, request: Request, last: float) -> float:
        """Hold a token back until `pace`, as it is now, allows it; `last` and the result: when a token was due."""
        while (pace := self._board.config.pace) and (left := last + 1 / pace - time.monotonic()) > 0:
            if request.cancelled:
                break
            time.sleep(min(left, 0.02, 1 / pace))
        return max(last + 1 / pace, time.monotonic() - 0.005) if pace else time.monotonic()
