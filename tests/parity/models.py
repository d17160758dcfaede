"""Converted models for tests that run the whole engine: each setting is converted once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.engine.engine import Engine
from colibri_lab.ops.isa import available
from tests.makers import Checkpoint

Converted = Callable[..., Path]
EXACT = {"precision": "exact", "kv_cache_dtype": "fp32", "telemetry": False}


class Converter:
    """Keeps what it converted by name and settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[tuple[Any, ...], Path] = {}

    def __call__(self, name: str, checkpoint: Callable[[], Checkpoint] | Path, **settings: Any) -> Path:
        key = (name, *sorted(settings.items()))
        if key not in self.done:
            at = self.folder / f"{name}-{len(self.done)}"
            source = checkpoint if isinstance(checkpoint, Path) else checkpoint().save(at.with_suffix(".hf"))
            self.done[key] = convert(source, at, **settings)
        return self.done[key]


def levels() -> list[str]:
    """The ISA levels that this machine can run, best first."""
    return list(available())


@contextmanager
def engine(path: Path, *, isa: str | None = None, **overrides: Any) -> Iterator[Engine]:
    """An engine in exact mode with fp32 KV, unless said otherwise; `isa` forces a level of the cpu backend."""
    with pytest.MonkeyPatch.context() as patch:
        if isa:
            patch.setenv("COLIBRI_ISA", isa)
            overrides.setdefault("backend", "cpu")
        made = Engine.load(path, **(EXACT | overrides))
    with made:
        if isa:
            assert made.describe()["isa"] == isa
        yield made


def greedy(made: Engine, prompt: list[int], count: int) -> list[int]:
    return [token.id for token in made.generate(prompt, max_tokens=count)]


def logits(made: Engine, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    out = made.logits(ids)
    assert out.dtype == np.float32 and out.shape == (len(ids), made.describe()["vocab"])
    return out
