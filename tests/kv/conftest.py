"""Two small models with more experts than have slots of their own: plain, and with a dense layer and a window."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri_lab.convert import convert
from tests.makers import make


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
