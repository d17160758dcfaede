"""Two small models with more experts than have slots of their own: plain, and with a dense layer and a window; and the
tiny one of the persistence tests, with what it says without persistence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colibri_lab.convert import convert
from tests.makers import make

from .stored import load, said, tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("kv")
    plain = make("mixtral", 5, num_local_experts=20, max_position_embeddings=2048)
    mixed = make(
        "qwen2_moe", 6, num_experts=13, num_hidden_layers=4, mlp_only_layers=[1], max_position_embeddings=2048,
        use_sliding_window=True, sliding_window=150, max_window_layers=2,
    )  # fmt: skip
    return {
        name: convert(made.save(at / f"{name}-hf"), at / name, quantize="fp32")
        for name, made in (("plain", plain), ("mixed", mixed))
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Any:
    """What a prompt gives without persistence."""
    heard: dict[tuple[Any, ...], Any] = {}

    def ask(ids: list[int], tokens: int = 12, dtype: str = "fp16", backend: str = "cpu", **how: Any) -> Any:
        key = (tuple(ids), dtype, backend, *sorted(how.items()))
        if len(heard.get(key, ())) < tokens:  # fewer tokens are the beginning of more
            with load(model, None, kv_cache_dtype=dtype, backend=backend) as engine:
                heard[key] = said(engine, ids, max(tokens, 30 if backend == "cpu" else 3), **how)
        return heard[key][:tokens]

    return ask
