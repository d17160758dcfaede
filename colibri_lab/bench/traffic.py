"""What a paging benchmark lets a model read: text that it writes itself, or tokens that come and go like topics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.bench.harness import Block, measured
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

    def load(self, **settings: Any) -> Engine:
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


def zipf_markov(model: Path, vocabulary: int, tokens: int, threads: int, seed: int = 0, topics: int = 6,
                words: int = 400, stay: float = 0.97, exponent: float = 1.2) -> Traffic:  # fmt: skip
    """Random weights read `tokens` ids one by one: each of a topic's `words`, by Zipf's law, the topic a Markov chain.

    Routing follows the ids, since the residual stream is mostly the token's embedding; so popularity and topics of the
    ids become those of the experts, and all that the engine does, gates included, is what it does with a real model.
    """
    random = np.random.default_rng(seed)
    vocabularies = [random.choice(np.arange(3, vocabulary), words, replace=False) for _ in range(topics)]
    weight = np.arange(1, words + 1) ** -exponent
    rank = random.choice(words, tokens, p=weight / weight.sum())
    topic, ids = 0, []
    for r in rank.tolist():
        if random.random() > stay:
            topic = int(random.integers(topics))
        ids.append(int(vocabularies[topic][r]))
    lasts = f"a topic lasts {1 / (1 - stay):.0f}"
    said = f"{tokens} tokens one by one, Zipf {exponent} over {words} words of each of {topics} topics, {lasts}"
    engine = {"threads": threads, "prefill_chunk": 1, "kv_cache_max_slots": 512}
    return Traffic(model, [ids], 1, said, engine)
