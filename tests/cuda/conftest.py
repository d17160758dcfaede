"""Simulator and NVRTC are for Linux on x86-64: elsewhere the tests of CUDA kernels are no part of a run."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.convert import convert
from tests.makers import FAMILIES, make

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("int4", {"sliding_window": 6}),
    "qwen2_moe": ("int8", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3_moe": ("fp16", {"num_experts_per_tok": 3}),
    "olmoe": ("int4", {"clip_qkv": 0.7}),
}

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family, converted, each with another format and oddity."""
    at = tmp_path_factory.mktemp("cuda")
    assert set(MODELS) == set(FAMILIES)
    return {
        name: convert(make(name, 12, **overrides).save(at / f"{name}-hf"), at / name, quantize=quantize)
        for name, (quantize, overrides) in MODELS.items()
    }
