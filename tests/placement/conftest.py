"""The converted models of the placement tests: one of each family, none of them plain, and the embedded one.

The embedded model is wide enough that a decode step wakes the second thread; the tiny ones mostly are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colibri_lab.convert import convert
from tests.makers import FAMILIES, make
from tests.oracle import embedded

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("fp32", {"sliding_window": 8, "num_hidden_layers": 3}),
    "qwen2_moe": ("int4", {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 7}),
    "qwen3_moe": ("int8", {"num_experts_per_tok": 3, "hidden_size": 40, "moe_intermediate_size": 25}),
    "olmoe": ("fp16", {"clip_qkv": 0.7, "num_experts_per_tok": 1}),
    "tiny-moe": ("int4", {}),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("placement")
    made = {}
    for name, (quantize, overrides) in MODELS.items():
        source = make(name, 41, **overrides).save(at / f"{name}-hf") if name in FAMILIES else embedded.MODEL
        made[name] = convert(source, at / name, quantize=quantize)
    return made
