"""From what a caller asks for to a request that the engine can run, checked before anything is computed."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from .sampling import Sampler, Sampling, whole
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
    if (most := whole(asked.max_tokens)) is None or most < 0:
        raise RequestError(f"max_tokens must be a whole number from 0, not {asked.max_tokens!r}")
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty, asked.seed)
    stops = StopTexts(asked.stop)
    ids = prompt_ids(parts, text_or_ids(parts, prompt) or [_start_token(parts)])
    # A token needs a position only when it is fed back, so the last one may lie just past the context.
    limit = min(most, parts.max_positions - len(ids) + 1)
    ends = frozenset((*parts.tokenizer.eos, *parts.file.spec.eos))
    return Request(number, ids, len(ids), limit, Sampler(sampling, ids), stops, parts.tokenizer.stream(ids), ends)


def text_or_ids(parts: Any, prompt: Any) -> list[Any]:
    """Ids of a text, or the given ids, unchecked. RequestError for what is neither."""
    if isinstance(prompt, str):
        return list(parts.tokenizer.encode(prompt))
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray, dict)):
        raise RequestError(f"a prompt is a text or a list of token ids, not {reprlib.repr(prompt)}")
    return list(prompt)


def prompt_ids(parts: Any, ids: list[Any], any_length: bool = False) -> list[int]:
    """Checked token ids: at least one, each in the vocabulary, no more than the context holds."""
    vocab, most = parts.file.spec.vocab_size, parts.max_positions
    if not ids:
        raise RequestError("no token ids")
    found: list[int] = []
    for place, given in enumerate(ids):
        if (id := whole(given)) is None or not 0 <= id < vocab:
            shown = reprlib.repr(given)
            raise RequestError(f"token id {shown} at place {place} is no whole number from 0 to {vocab - 1}")
        found.append(id)
    if len(ids) > most and not any_length:
        raise RequestError(f"the prompt has {len(ids)} tokens, {len(ids) - most} more than the context of {most}")
    return found


def _start_token(parts: Any) -> int:
    for bos in (parts.tokenizer.bos, parts.file.spec.bos):
        if bos is not None:
            return int(bos)
    raise RequestError("the prompt is empty and this model has no start token to begin with; give a prompt")
