"""The int4 encoder in C gives the reference's bits at every ISA level."""

from __future__ import annotations

import ctypes as c
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.convert import quantise
from colibri_lab.model.errors import ModelError
from colibri_lab.ops import encode
from colibri_lab.ops.cpu import open_library
from colibri_lab.ops.isa import available
from colibri_lab.ops.layout import MatrixLayout


def library(level: str) -> Any:
    found = open_library(level)[1]
    found.colibri_encode_int4.argtypes = [c.c_void_p, c.c_int64, c.c_int64, c.c_int, c.c_void_p, c.c_void_p]
    return found


@pytest.mark.parametrize("level", available())
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 300), group=st.sampled_from([32, 64, 128]),
    power=st.integers(-27, 15), zeros=st.sampled_from([0.0, 0.3, 0.98]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_the_same_bits(level: str, rows: int, cols: int, group: int, power: int, zeros: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = (random.uniform(-1, 1, (rows, cols)) * 2.0**power).astype(np.float32)
    if seed % 2:
        x = np.round(x * np.float32(2.0 ** (3 - power))) * np.float32(2.0**power)  # ties, and exact codes
    x[random.random(x.shape) < zeros] *= np.float32(-0.0)
    expected = quantise.encode_int4(x, group)
    found = encode.encode_int4(x, group, library(level))
    assert found is not None
    assert found[0].tobytes() == expected[0].tobytes()
    assert found[1].tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("level", available())
def test_a_scale_that_does_not_fit_is_the_reference_s_to_refuse(level: str) -> None:
    x = np.full((16, 32), 1e6, np.float32)
    assert encode.encode_int4(x, 32, library(level)) is None
    layout = MatrixLayout(16, 32, "int4", 32)
    with pytest.raises(ModelError, match="w: values are too large"):
        quantise.pack_rows(x, layout, np.zeros(layout.end, np.uint8), "w")


def test_without_kernels_the_reference_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((32, 96), np.float32)
    layout = MatrixLayout(32, 96, "int4", 32)
    fast, plain = (np.zeros(layout.end, np.uint8) for _ in range(2))
    quantise.pack_rows(x, layout, fast, "w")
    monkeypatch.setattr(encode, "_kernel", lambda: None)
    quantise.pack_rows(x, layout, plain, "w")
    assert fast.tobytes() == plain.tobytes() and fast.any()
