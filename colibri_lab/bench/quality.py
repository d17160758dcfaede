"""What quantisation costs: perplexity of the embedded model on held-out text, each storage beside fp16."""

from __future__ import annotations

import math
from pathlib import Path

from colibri_lab.bench.result import Result
from colibri_lab.engine.engine import Engine
from colibri_lab.paths import embedded_model

BAR = 1.03  # int4 over fp16


def documents(path: Path) -> list[str]:
    """A validation text's documents, which form feeds separate."""
    return [part.strip("\n") for part in path.read_text("utf8").split("\f") if part.strip()]


def mean_loss(engine: Engine, texts: list[str]) -> float:
    """Mean negative log-likelihood per token over all texts, each read on its own."""
    total, count = 0.0, 0
    for text in texts:
        tokens = len(engine.tokenizer.encode(text)) - 1  # all but the start token are predicted
        total += math.log(engine.perplexity(text)) * tokens
        count += tokens
    return total / count


def run(folder: Path, quantize: tuple[str, ...] = ("int8", "int4"), characters: int = 12000) -> Result:
    """Perplexity by domain on the first `characters` of each text in `folder`; ValueError when there is none."""
    texts = {path.stem: first_documents(documents(path), characters) for path in sorted(folder.glob("*.txt"))}
    if not texts:
        raise ValueError(f"{folder} holds no .txt files; a checkout has them in data/validation")
    result = Result("perplexity")
    found: dict[str, dict[str, float]] = {}
    for kind in ("fp16", *quantize):
        with Engine.load(embedded_model(), quantize=kind, max_batch_size=1, prefill_chunk=256) as engine:
            found[kind] = {domain: mean_loss(engine, parts) for domain, parts in texts.items()}
    for kind in quantize:
        for domain, loss in found[kind].items():
            plain = math.exp(found["fp16"][domain])
            result.add(
                f"{kind}, {domain}", math.exp(loss), "perplexity", peer="fp16", peer_value=plain, smaller_is_better=True
            )
        mine, theirs = (sum(found[k].values()) / len(texts) for k in (kind, "fp16"))
        result.add(f"{kind}, all domains", math.exp(mine - theirs), "times fp16's", limit=BAR)
    return result


def first_documents(texts: list[str], characters: int) -> list[str]:
    """Whole documents up to about so many characters, at least one."""
    kept: list[str] = []
    for text in texts:
        if kept and sum(map(len, kept)) + len(text) > characters:
            break
        kept.append(text)
    return kept
