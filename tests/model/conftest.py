"""One converted model for all tests of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri_lab.convert import convert
from tests.makers import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("store")
    return convert(
        make("qwen2_moe", exact="int4", decoder_sparse_step=2, num_hidden_layers=4).save(at / "hf"), at / "out"
    )
