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
        self.distinct: set[int] = set()  # their hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        self._backend.attn_router(layer, n, at)
        x = self._rows.ffn_in[at : at + n]
        self._sink(layer, x)
        self.heard += n
        self.distinct.update(hash((layer, row.tobytes())) for row in x)


def listen(engine: Engine, texts: list[str], least: int, sink: Sink) -> tuple[int, int]:
    """Run `texts`, then continuations that the model samples from them (each with a seed of its own), until the sink
    has had at least `least` different rows. Rows, one for each layer and token, and how many of them are different: the
    start token's, say, are always the same."""
    transformer = engine._parts.transformer
    listener = Listener(transformer.backend, engine._parts.rows, sink)
    transformer.backend = listener
    try:
        for text in texts:
            if len(listener.distinct) < least:
                engine.perplexity(text)
        for seed in count(1):
            if len(listener.distinct) >= least:
                return listener.heard, len(listener.distinct)
            chosen = [texts[(seed * BATCH + i) % len(texts)] for i in range(BATCH)]
            starts = [engine.tokenizer.encode(text)[:24] for text in chosen]
            for _ in engine.generate_batch(starts, max_tokens=600, temperature=1.0, seed=seed):
                if len(listener.distinct) >= least:
                    break
    finally:
        transformer.backend = listener._backend
    raise AssertionError("seeds do not end")
