"""Golden of the embedded model: logits of a fixed text, greedy tokens of some prompts, perplexity of texts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .goldens import FOLDER, LEAST_MARGIN, NEW_TOKENS, error

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "data" / "tiny-moe"
TEXTS = ROOT / "data" / "validation"
FIXED = (
    "It was a truth she had often heard, that the sum of 12 and 30 is 42.\n"
    "def walk(tree):\n    return [node for node in tree]\n"
)
PROMPTS = (
    "She was very much surprised to find that",
    "KING. What news, my lord?\n",
    "def read(self, size):\n    ",
    "17 + 25 = ",
    "The house was ",
    "Enter HAMLET.\n",
    "import os\n",
)
KEPT = 3  # prompts whose 64 greedy tokens have healthy margins
WINDOW = 512  # tokens of one perplexity window, bos among them
WINDOWS = 2  # of each text

Arrays = dict[str, np.ndarray[Any, Any]]


def encode(text: str) -> list[int]:
    """Ids with the bos that the tokenizer's own post-processor sets."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text).ids
    return ids


def validation() -> dict[str, str]:
    """Name -> text of the committed validation texts."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt"))}


def windows(text: str, count: int = WINDOWS) -> list[list[int]]:
    """The first `count` windows of a text, each with its own bos."""
    bos, *ids = encode(text)
    step = WINDOW - 1
    return [[bos, *ids[i : i + step]] for i in range(0, len(ids), step)][:count]


def nll(logits: np.ndarray[Any, Any], ids: list[int]) -> tuple[float, int]:
    """(sum of -log p of ids[1:], their number) from the logits [T, V] of ids."""
    x = logits[:-1].astype(np.float64)
    top = x.max(1)
    logsum = top + np.log(np.exp(x - top[:, None]).sum(1))
    return float((logsum - x[np.arange(len(x)), ids[1:]]).sum()), len(x)


def perplexity(logits: Callable[[list[int]], np.ndarray[Any, Any]], text: str, count: int = WINDOWS) -> float:
    parts = [nll(logits(ids), ids) for ids in windows(text, count)]
    return math.exp(sum(part[0] for part in parts) / sum(part[1] for part in parts))


def model_hash() -> str:
    return hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()


def make(load: Callable[..., Any], logits_of: Callable[..., Any], greedy_of: Callable[..., Any]) -> Arrays:
    """The golden arrays, from transformers."""
    model, ids = load(MODEL), encode(FIXED)
    arrays: Arrays = {"hash": np.array(model_hash()), "ids": np.array(ids), "logits": logits_of(model, ids)}
    kept = 0
    for prompt in PROMPTS:
        start = encode(prompt)
        try:
            tokens, margin = greedy_of(model, start, NEW_TOKENS, LEAST_MARGIN)
        except AssertionError as reason:
            print(f"embedded: {prompt!r} left out: {reason}")
            continue
        print(f"embedded: {prompt!r} margin {margin:.1e}")
        made = {"text": prompt, "prompt": start, "tokens": tokens}
        arrays |= {f"{name}{kept}": np.array(value) for name, value in made.items()}
        kept += 1
        if kept == KEPT:
            break
    if kept < KEPT:
        raise AssertionError(f"only {kept} prompts have healthy margins")
    for name, text in validation().items():
        arrays[f"ppl/{name}"] = np.array(perplexity(lambda x: logits_of(model, x), text))
        print(f"embedded: perplexity of {name} {float(arrays[f'ppl/{name}']):.4f}", flush=True)
    return arrays


@cache
def load() -> Arrays:
    with np.load(FOLDER / "embedded.npz") as stored:
        return {name: stored[name] for name in stored.files}


def same(fresh: Arrays) -> float:
    """Compare with the committed golden; tokens equal, perplexities to 1e-4."""
    old = load()
    for name, value in fresh.items():
        if name.startswith("ppl/"):
            if abs(float(old[name]) / float(value) - 1) > 1e-4:
                raise AssertionError(f"{name}: {old[name]} committed, {value} now")
        elif name != "logits" and not np.array_equal(old[name], value):
            raise AssertionError(f"embedded {name} differs from the committed golden")
    worst = error(old["logits"], fresh["logits"])
    if worst > 1e-4:
        raise AssertionError(f"embedded logits differ by {worst:.1e}")
    return worst
