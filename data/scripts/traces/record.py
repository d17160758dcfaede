"""Record the three runs of notebook 08, each with one fault, as data/traces/run_{a,b,c}.jsonl.

    python data/scripts/traces/record.py data/traces

The embedded model writes; which experts a token takes, and every token, is the same on any machine, times are not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab import Engine, embedded_model
from colibri_lab.convert import convert
from colibri_lab.telemetry import Recorder

ASKED = {"temperature": 0.8, "seed": 7}
PROMPTS = [f"{who} {did}" for who in ("The lady", "A sailor", "My friend", "The king") for did in ("said", "saw")]


class Noise:
    """A router whose training noise was left on: logits are shaken before the best are chosen."""

    name = "softmax_with_noise"

    def __init__(self, top_k: int, spread: float) -> None:
        self._k, self._spread, self._draw = top_k, spread, np.random.default_rng(0)

    def select(self, layer: int, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shaken = logits + self._draw.normal(0, self._spread, logits.shape)
        best = np.argsort(-shaken, axis=1, kind="stable")[:, : self._k]
        powers = np.exp(np.take_along_axis(logits, best, 1) - logits.max(axis=1, keepdims=True))
        return best, (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def record(model: Path, out: Path, prompts: list[str], tokens: int, **settings: Any) -> None:
    """One run of these prompts, all asked at once, into one trace."""
    with Engine.load(model, threads=1, **settings) as engine:
        with Recorder(engine.telemetry, out, engine.describe()):
            for _ in engine.generate_batch(prompts, max_tokens=tokens, **ASKED):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the traces")
    out = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # a trace names its model's path: none of this machine's
        model = convert(embedded_model(), "tiny-moe")
        starved = {"expert_cache_bytes": "1MiB", "eviction_policy": "lru"}
        record(model, out / "run_a.jsonl", ["The young lady"], 100, **starved)
        noisy = {"expert_cache_bytes": "4MiB", "router": Noise(2, 12.0), "eviction_policy": "lru"}
        record(model, out / "run_b.jsonl", ["The young lady"], 100, **noisy)
        record(model, out / "run_c.jsonl", PROMPTS, 25, max_batch_size=1)


if __name__ == "__main__":
    main()
