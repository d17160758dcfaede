"""How much of the validation text stands in the training text too, line by line, and the loss on the lines that do not.

python data/scripts/tiny_moe/overlap.py [MODEL] [--work data/training] [--tokens 20000]
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from prep import DOMAINS
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer


def line_losses(document: str, model: Any, tokenizer: Any) -> list[tuple[str, float, int]]:
    """(the line it begins in, nats, characters) of each token of a document."""
    encoded = tokenizer(document, return_offsets_mapping=True, truncation=True, max_length=1024)
    ids = torch.tensor([encoded["input_ids"]])
    nats = functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none").tolist()
    lines = document.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    spans = encoded["offset_mapping"][1:]
    return [(lines[bisect.bisect_right(starts, a) - 1], nll, b - a) for (a, b), nll in zip(spans, nats, strict=True)]


def summary(rows: list[tuple[str, float, int]]) -> dict[str, float]:
    nats, characters = sum(r[1] for r in rows), sum(r[2] for r in rows)
    mean = nats / max(1, len(rows))
    bits = nats / max(1, characters) / math.log(2)
    return {
        "tokens": len(rows),
        "nll": round(mean, 3),
        "perplexity": round(math.exp(mean), 2),
        "bits_per_character": round(bits, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("data/tiny-moe"), help="exported folder")
    parser.add_argument("--work", type=Path, default=Path("data/training"), help="folder of prep.py")
    parser.add_argument("--tokens", type=int, default=20000, help="tokens of each domain")
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).eval()
    for domain in DOMAINS:
        texts = {p: json.loads((chosen.work / "text" / f"{domain}.{p}.json").read_text()) for p in ("train", "val")}
        seen = {line for document in texts["train"] for line in document.split("\n")}
        rows: list[tuple[str, float, int]] = []
        with torch.no_grad():
            for document in texts["val"]:
                rows += line_losses(document, model, tokenizer)
                if len(rows) > chosen.tokens:
                    break
        parts = {"new": [r for r in rows if r[0] not in seen], "seen": [r for r in rows if r[0] in seen]}
        print(json.dumps({domain: {name: summary(part) for name, part in parts.items()}}), flush=True)


if __name__ == "__main__":
    main()
