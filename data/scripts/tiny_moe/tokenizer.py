"""Step 3 of 5: train the tokenizer, then turn the documents into token ids.

    python data/scripts/tiny_moe/tokenizer.py [--work data/training] [--vocab 3072]

Byte-level BPE with single digits. Writes <work>/tokenizer.json and <work>/ids/<domain>.{train,val}.npy (uint16),
each document between <s> (1) and </s> (2).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from prep import DOMAINS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SHARE = {"novel": 4e6, "play": 4e6, "python": 2e6, "dict": 2e6, "math": 0.6e6}  # characters shown to the trainer
BOS, EOS = 1, 2


def training_text(folder: Path) -> Iterator[str]:
    for domain in DOMAINS:
        total = 0
        for document in json.loads((folder / f"{domain}.train.json").read_text()):
            yield document
            total += len(document)
            if total > SHARE[domain]:
                break


def train(folder: Path, vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(folder), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """uint16 [tokens]"""
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(documents, add_special_tokens=False):
        ids += [BOS, *encoded.ids, EOS]
    return np.array(ids, np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("data/training"), help="folder of prep.py")
    parser.add_argument("--vocab", type=int, default=3072, help="number of tokens, at most 65536")
    chosen = parser.parse_args()
    tokenizer = train(chosen.work / "text", chosen.vocab)
    tokenizer.save(str(chosen.work / "tokenizer.json"))
    (chosen.work / "ids").mkdir(exist_ok=True)
    for domain in DOMAINS:
        for part in ("train", "val"):
            documents = json.loads((chosen.work / "text" / f"{domain}.{part}.json").read_text())
            ids = encode(tokenizer, documents)
            np.save(chosen.work / "ids" / f"{domain}.{part}.npy", ids)
            density = sum(map(len, documents)) / len(ids)
            print(f"{domain:7s} {part:5s} {len(ids):8d} tokens, {density:.2f} characters a token")


if __name__ == "__main__":
    main()
