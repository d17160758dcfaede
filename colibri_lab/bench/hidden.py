"""Hidden states as the routers of a running model see them: the validation texts, then texts that the model writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from colibri_lab.engine.engine import Engine
from colibri_lab.ops.types import F32

Sink = Callable[[int, F32], None]  # (layer, normed hidden states [n, H] of one step; a view, valid until the next)
CHUNK, BATCH = 256, 16
MOST_ROWS = CHUNK + BATCH  # of one step


class Listener:
    """A backend that shows each sparse layer's router input to `sink`, and is the backend that it wraps otherwise."""

    def __init__(self, backend: Any, rows: Any, sink: Sink) -> None:
        self._backend, self._rows, self._sink = backend, rows, sink
        self.heard = 0  # rows, over all layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attn_router(self, layer: int, n: int) -> None:
        self._backend.attn_router(layer, n)
        self._sink(layer, self._rows.ffn_in[:n])
        self.heard += n


def listen(engine: Engine, texts: list[str], least: int, sink: Sink) -> int:
    """Run `texts`, then continuations that the model samples from them (each with a seed of its own), until the sink
    has had at least `least` rows: one for each layer and token, no row twice. Returns how many."""
    transformer = engine._parts.transformer
    listener = Listener(transformer.backend, engine._parts.rows, sink)
    transformer.backend = listener
    try:
        for text in texts:
            if listener.heard < least:
                engine.perplexity(text)
        for seed in count(1):
            if listener.heard >= least:
                return listener.heard
            starts = [engine.tokenizer.encode(text)[:24] for text in texts[:BATCH]]
            for _ in engine.generate_batch(starts, max_tokens=600, temperature=1.0, seed=seed):
                if listener.heard >= least:
                    break
    finally:
        transformer.backend = listener._backend
    raise AssertionError("seeds do not end")
