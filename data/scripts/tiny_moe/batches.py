"""Windows of token ids for training and validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from prep import DOMAINS
from tokenizer import BOS
from torch import Tensor

Ids = NDArray[np.int64]
MIX = ((4, 3, 2, 2, 1), (3, 4, 2, 2, 1))  # short windows by domain in a step, one row for each process in turn


def load(folder: Path, part: str) -> dict[str, Ids]:
    """Token ids by domain; part is train or val."""
    return {domain: np.load(folder / f"{domain}.{part}.npy").astype(np.int64) for domain in DOMAINS}


class Batches:
    """Random windows of one process: a short step has 12 of `short` tokens, a long one as many tokens in windows of
    `context`. Half of the windows begin where a document begins."""

    def __init__(self, ids: dict[str, Ids], rank: int, seed: int, short: int, context: int) -> None:
        self.ids, self.short, self.context = ids, short, context
        self.random = np.random.default_rng(seed + 17 * rank + 1)
        self.mix = MIX[rank % len(MIX)]
        self.deck: list[int] = []  # domains of the long windows to come
        starts = {domain: np.flatnonzero(a == BOS) for domain, a in ids.items()}
        self.starts = {domain: s[s < len(ids[domain]) - context - 1] for domain, s in starts.items()}

    @property
    def tokens(self) -> int:
        """Tokens of one step of one process."""
        return sum(self.mix) * self.short

    def window(self, domain: str, length: int) -> Ids:
        a = self.ids[domain]
        at = (
            self.random.choice(self.starts[domain])
            if self.random.random() < 0.5
            else self.random.integers(0, len(a) - length - 1)
        )
        return a[at : at + length + 1]

    def next(self, long: bool) -> Tensor:
        """int64 [B, L + 1]"""
        if not long:
            windows = [self.window(d, self.short) for d, n in zip(DOMAINS, self.mix, strict=True) for _ in range(n)]
            return torch.from_numpy(np.stack(windows))
        count = self.tokens // self.context
        if len(self.deck) < count:
            shares = np.sum(MIX, axis=0)
            self.deck = self.random.permutation(np.repeat(np.arange(len(DOMAINS)), shares)).tolist()
        return torch.from_numpy(np.stack([self.window(DOMAINS[self.deck.pop()], self.context) for _ in range(count)]))


def validation_windows(ids: Ids, length: int, count: int) -> Tensor:
    """int64 [count, length + 1]: the first windows of the held-out ids, fewer where the text is shorter."""
    count = min(count, len(ids) // (length + 1))
    return torch.from_numpy(ids[: count * (length + 1)].reshape(count, length + 1))


def mutual_information(counts: Tensor) -> float:
    """Bits of information between rows and columns of a table of counts (rows weighted as given)."""
    p = counts / counts.sum()
    independent = p.sum(0, keepdim=True) * p.sum(1, keepdim=True)
    return float((p * ((p + 1e-12) / (independent + 1e-12)).log2()).sum())
