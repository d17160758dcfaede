"""From what a caller asks for to a request that the engine can run, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from .sampling import Sampler, Sampling
from .sequence import Request
from .stop import StopTexts


@dataclass(frozen=True)
class Asked:
    """The arguments of `Engine.generate`, bar the prompt."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None


def prepare(parts: Any, prompt: str | Sequence[int], asked: Asked, number: int) -> Request:
    """A request that fits the model, or RequestError."""
    if isinstance(asked.max_tokens, bool) or not isinstance(asked.max_tokens, int) or asked.max_tokens < 0:
        raise RequestError(f"max_tokens must be a whole number from 0, not {asked.max_tokens!r}")
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty, asked.seed)
    stops = StopTexts(asked.stop)
    ids = parts.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    ids = prompt_ids(parts, ids or [_start_token(parts)])
    # A token needs a position only when it is fed back, so the last one may lie just past the context.
    limit = min(asked.max_tokens, parts.max_positions - len(ids) + 1)
    ends = frozenset((*parts.tokenizer.eos, *parts.file.spec.eos))
    return Request(number, ids, len(ids), limit, Sampler(sampling, ids), stops, parts.tokenizer.stream(ids), ends)


def prompt_ids(parts: Any, ids: list[Any], any_length: bool = False) -> list[int]:
    """Checked token ids: at least one, each in the vocabulary, no more than the context holds."""
    vocab, most = parts.file.spec.vocab_size, parts.max_positions
    if not ids:
        raise RequestError("no token ids")
    for place, id in enumerate(ids):
        if isinstance(id, bool) or not hasattr(id, "__index__") or not 0 <= id < vocab:
            raise RequestError(f"token id {id!r} at place {place} is no whole number from 0 to {vocab - 1}")
    if len(ids) > most and not any_length:
        raise RequestError(f"the prompt has {len(ids)} tokens, {len(ids) - most} more than the context of {most}")
    return [int(id) for id in ids]


def _start_token(parts: Any) -> int:
    for bos in (parts.tokenizer.bos, parts.file.spec.bos):
        if bos is not None:
            return int(bos)
    raise RequestError("the prompt is empty and this model has no start token to begin with; give a prompt")
