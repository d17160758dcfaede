"""The tiny model of the persistence tests, and what it says without persistence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .stored import load, said, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Any:
    """What a prompt gives without persistence."""
    heard: dict[tuple[Any, ...], Any] = {}

    def ask(ids: list[int], tokens: int = 12, dtype: str = "fp16", backend: str = "cpu", **how: Any) -> Any:
        key = (tuple(ids), tokens, dtype, backend, *sorted(how.items()))
        if key not in heard:
            with load(model, None, kv_cache_dtype=dtype, backend=backend) as engine:
                heard[key] = said(engine, ids, tokens, **how)
        return heard[key]

    return ask
