"""What a paging benchmark lets a model read: text that it writes itself, or tokens that come and go like topics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.analysis.routes import zipf_markov_routes
from colibri_lab.bench.harness import Block, measured
from colibri_lab.bench.shapes import Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.paths import embedded_model

PROMPT = 32  # tokens of each text that are given; the model writes the rest


@dataclass(frozen=True)
class Traffic:
    """A model, its prompts, and how many tokens it writes after each; the same tokens in every run."""

    model: Path
    prompts: list[list[int]]
    tokens: int
    said: str
    engine: dict[str, Any] = field(default_factory=dict)  # settings of every run
    sampling: dict[str, Any] = field(default_factory=dict)
    router: Callable[[], Any] | None = None  # a fresh one for each engine

    def load(self, **settings: Any) -> Engine:
        if self.router is not None:
            settings["router"] = self.router()
        return Engine.load(self.model, **({"max_batch_size": 1, "pin_after_tokens": None} | self.engine | settings))

    def run(self, engine: Engine) -> tuple[Block, list[list[int]]]:
        """All prompts in turn: (time, with all tokens read or written as work; what was written)."""
        written = []
        with measured(0) as block:
            for prompt in self.prompts:
                written.append([t.id for t in engine.generate(prompt, max_tokens=self.tokens, **self.sampling)])
        block.work = sum(map(len, self.prompts)) + sum(map(len, written))
        return block, written


def texts(beginnings: list[str], tokens: int, threads: int) -> Traffic:
    """The embedded model goes on with each text, sampled with a fixed seed."""
    with Engine.load(embedded_model(), threads=threads) as engine:
        prompts = [engine.tokenizer.encode(text)[:PROMPT] for text in beginnings]
    said = f"{len(prompts)} texts, {PROMPT} tokens each given, {tokens} written"
    return Traffic(embedded_model(), prompts, tokens, said, {"threads": threads},
                   {"temperature": 0.8, "top_k": 40, "seed": 7})  # fmt: skip


class ImposedRouter:
    """A router for random weights, whose own routing hardly changes from token to token: it follows given routes.

    Rows come layer by layer and in order within a layer, in groups of any size.
    """

    def __init__(self, routes: NDArray[np.int64]) -> None:
        self._routes = routes
        self._seen = [0] * len(routes)

    def select(self, layer: int, logits: NDArray[np.float32]) -> tuple[Any, Any]:
        """See router.hook.Router."""
        at, n = self._seen[layer], len(logits)
        self._seen[layer] += n
        chosen = self._routes[layer, at : at + n]
        return chosen, np.full(chosen.shape, 1 / chosen.shape[1], np.float32)


def zipf_markov(model: Path, shape: Shape, tokens: int, threads: int, seed: int = 0) -> Traffic:
    """Random weights read `tokens` ids one by one that come and go like topics, each with Zipf's frequencies.

    Where the shape's own gates route (Shape.branch), the ids do; else they are random, and the experts come and go.
    """
    engine = {"threads": threads, "prefill_chunk": 1, "kv_cache_max_slots": 512}
    if shape.branch is not None:
        ids = 3 + zipf_markov_routes(1, shape.vocab - 3, 1, tokens, seed=seed)[0, :, 0]
        said = f"{tokens} tokens one by one, Zipf 1.2 within each of 6 topics of 33 tokens; the model's own gates route"
        return Traffic(model, [ids.tolist()], 1, said, engine)
    ids = np.random.default_rng(seed).integers(3, shape.vocab, tokens)
    said = f"{tokens} tokens one by one, routed by Zipf 1.2 within each of 6 topics, a topic lasts 33 tokens"
    routes = zipf_markov_routes(shape.layers, shape.experts, shape.top_k, tokens + 1, seed=seed)
    return Traffic(model, [ids.tolist()], 1, said, engine, {}, lambda: ImposedRouter(routes))
