"""Reading the committed goldens, and the tolerances that they are held to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.makers import Checkpoint

from .settings import SETTINGS, Setting

FOLDER = Path(__file__).parent / "goldens"
NEW_TOKENS = 64
LEAST_MARGIN = (
    1e-3  # of the first over the second logit, relative to the largest: what makes 64 greedy tokens repeatable
)
LEAST_ROUTING = 1e-4  # of the last chosen over the first rejected router logit


@dataclass(frozen=True)
class Run:
    """One prompt of a golden: transformers' float32 logits [T, V] and its greedy continuation."""

    prompt: list[int]
    logits: np.ndarray[Any, np.dtype[np.float32]]
    tokens: list[int]


@dataclass(frozen=True)
class Golden:
    setting: Setting
    seed: int
    hash: str
    runs: tuple[Run, ...]

    def checkpoint(self) -> Checkpoint:
        """The checkpoint for our converter; a changed maker or random generator is told apart from a changed engine."""
        made = self.setting.checkpoint(self.seed)
        if made.hash != self.hash:
            raise AssertionError(
                f"the maker no longer makes the checkpoint of golden {self.setting.key}: run make test-oracle"
            )
        return self.setting.for_us(self.seed)


def prompts(setting: Setting, vocab: int) -> list[list[int]]:
    """Fixed prompts of the setting's lengths, without bos."""
    return [np.random.default_rng([7, length]).integers(3, vocab, length).tolist() for length in setting.lengths]


@cache
def load(key: str) -> Golden:
    """One setting's golden."""
    with np.load(FOLDER / f"{key.split('-')[0]}.npz") as stored:
        part = {name.removeprefix(f"{key}/"): stored[name] for name in stored.files if name.startswith(f"{key}/")}
    runs = tuple(
        Run(part[f"prompt{i}"].tolist(), part[f"logits{i}"], part[f"tokens{i}"].tolist())
        for i in range(len(SETTINGS[key].lengths))
    )
    return Golden(SETTINGS[key], int(part["seed"]), str(part["hash"]), runs)


def error(ours: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Largest difference relative to the largest logit."""
    return float(np.abs(np.asarray(ours, np.float64) - right).max() / np.abs(right).max())
