"""Writing a model file: from anywhere, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.model.families import read_spec
from colibri_lab.model.plan import make_plan
from colibri_lab.model.store import ModelFile, write_model
from tests.makers import base_config


def test_write_model_takes_any_weights(tmp_path: Path) -> None:
    """What the benchmark does: weights from nowhere, through the same writer."""
    spec = read_spec(base_config("olmoe"), "config.json")
    plan = make_plan(spec, "fp32", 0)
    rng = np.random.default_rng(0)
    seen: list[tuple[int, int]] = []

    def experts(layer: int, expert: int, out: Any) -> None:
        assert not out.any()
        out[:] = layer * 16 + expert

    path = write_model(
        tmp_path / "model.colibri",
        spec,
        "fp32",
        0,
        lambda piece: [rng.integers(0, 9, piece.nbytes).astype(np.uint8)],
        experts,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == plan.data_bytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with ModelFile.open(path) as file:
        assert file.identity == "0" * 64
        assert os.pread(file.fileno(), 3, file.extent(1, 7)[0]) == bytes([23] * 3)
        file.weights()
    assert os.listdir(tmp_path) == ["model.colibri"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_write_model_leaves_nothing_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    spec = read_spec(base_config("olmoe"), "config.json")
    (tmp_path / "model.colibri").write_text("good")

    def experts(layer: int, expert: int, out: Any) -> None:
        if expert == 5:
            raise error

    with pytest.raises(error):
        write_model(tmp_path / "model.colibri", spec, "int4", 32, lambda piece: [], experts)
    with pytest.raises(ValueError, match=r"was given 0 bytes, it takes"):
        write_model(tmp_path / "model.colibri", spec, "int4", 32, lambda piece: [], lambda *a: None)
    assert os.listdir(tmp_path) == ["model.colibri"]
    assert (tmp_path / "model.colibri").read_text() == "good"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
