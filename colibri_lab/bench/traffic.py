"""What a paging benchmark lets a model read: text that it writes itself, or tokens that come and go like topics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


class ZipfMarkovRouter:
    """A router for random weights, whose own routing hardly changes from token to token: routes without looking.

    Each topic has its own order of a layer's experts, of which the r-th has the weight r**-exponent; a topic lasts
    1 / (1 - stay) tokens on average. The same seed gives the same routes.
    """

    def __init__(self, experts: int, top_k: int, seed: int = 0, topics: int = 6, stay: float = 0.97,
                 exponent: float = 1.2) -> None:  # fmt: skip
        self._top_k, self._seed, self._topics, self._stay = top_k, seed, topics, stay
        self._weights = -exponent * np.log(np.arange(1, experts + 1))  # logarithms, by rank
        self._token, self._topic = 0, 0
        self._chain = np.random.default_rng(seed)

    def select(self, layer: int, logits: NDArray[np.float32]) -> tuple[Any, Any]:
        """One row at a time, layers in order; see router.hook.Router."""
        if len(logits) != 1:
            raise ValueError("routes one token at a time: prefill_chunk 1 and one sequence")
        if layer == 0:
            self._token += 1
            if self._chain.random() > self._stay:
                self._topic = int(self._chain.integers(self._topics))
        order = np.random.default_rng([self._seed, layer, self._topic]).permutation(len(self._weights))
        noise = np.random.default_rng([self._seed, layer, self._token, 1]).gumbel(size=len(self._weights))
        ranks = np.argsort(-(self._weights + noise), kind="stable")[: self._top_k]  # without replacement, by weight
        return order[ranks][None], np.full((1, self._top_k), 1 / self._top_k, np.float32)


def zipf_markov(model: Path, shape: Shape, tokens: int, threads: int, seed: int = 0) -> Traffic:
    """Random weights read `tokens` random ids one by one; ZipfMarkovRouter says where they go."""
    ids = np.random.default_rng(seed).integers(3, shape.vocab, tokens).tolist()
    engine = {"threads": threads, "prefill_chunk": 1, "kv_cache_max_slots": 512}
    said = f"{tokens} tokens one by one, routed by Zipf 1.2 within each of 6 topics, a topic lasts 33 tokens"
    return Traffic(model, [ids], 1, said, engine, {}, lambda: ZipfMarkovRouter(shape.experts, shape.top_k, seed))
