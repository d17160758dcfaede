"""Quantising.

Exact where it can be, never worse than plain rounding, loud where fp16 is too small (C2, spares on nibbles).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.convert.quantise import check_half, encode_int4, encode_int8, pack_matrix, stream_matrix
from colibri_lab.model.errors import ModelError
from colibri_lab.ops.layout import PAGE, MatrixLayout, expert_layouts
from colibri_lab.ops.pack import unpack, unpack_codes
from tests.makers import exact_4bit, exact_8bit

RNG = np.random.default_rng(0)


def decoded(codes: Any, scales: Any, group: int, cols: int) -> Any:
    wide = np.repeat(scales.astype(np.float32), group, axis=1)[:, :cols]
    return wide * (codes.astype(np.float32) - (8 if codes.dtype == np.uint8 else 0))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("cols", [1, 16, 24, 25, 32, 40, 128, 300])
@pytest.mark.parametrize("power", [-20, -5, 0, 11])
def test_exact_weights_come_back_exactly(group: int, cols: int, power: int) -> None:
    for encode, exact in ((encode_int4, exact_4bit), (encode_int8, exact_8bit)):
        rows = exact(RNG, 5, cols, 2.0**power)
        np.testing.assert_array_equal(decoded(*encode(rows, group), group, cols), rows)


def test_seven_at_full_scale_is_exact_too() -> None:
    codes = RNG.integers(-6, 7, (9, 64))
    codes[:, ::32] = RNG.choice([-7, 7], (9, 2))
    rows = (codes * 2.0**-4).astype(np.float32)
    np.testing.assert_array_equal(decoded(*encode_int4(rows, 32), 32, 64), rows)
    codes[:, ::32] = 8  # the positive end: the scale turns negative
    rows = (codes * 2.0**-4).astype(np.float32)
    got, scales = encode_int4(rows, 32)
    assert (scales < 0).all()
    np.testing.assert_array_equal(decoded(got, scales, 32, 64), rows)


def test_the_search_is_worth_its_time() -> None:
    rows = RNG.normal(size=(512, 256)).astype(np.float32)
    blocks = rows.reshape(-1, 32)
    full = np.where(-blocks.min(1) >= blocks.max(1), blocks.min(1), blocks.max(1))
    scale = (full / -8).astype(np.float16).astype(np.float32)[:, None]
    plain = (np.clip(np.rint(blocks / scale), -8, 7) * scale - blocks) ** 2
    ours = (decoded(*encode_int4(rows, 32), 32, 256) - rows) ** 2
    assert (ours.reshape(-1, 32).sum(1) <= plain.sum(1) * 1.0001).all()
    assert ours.sum() < 0.95 * plain.sum()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    cols=st.integers(1, 70),
    power=st.integers(-30, 14),
    group=st.sampled_from([32, 64, 128]),
)
def test_errors_are_bounded(seed: int, cols: int, power: int, group: int) -> None:
    """Off by at most a step's half (at the ends of int4: one and a half), whatever the magnitude; zeros stay zeros."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_t(2, (3, cols)).clip(-30, 30) * 2.0**power).astype(np.float32)
    rows[rng.random(rows.shape) < 0.2] = 0
    for encode, steps in ((encode_int4, 1.51), (encode_int8, 0.51)):
        codes, scales = encode(rows, group)
        got = decoded(codes, scales, group, cols)
        step = np.abs(np.repeat(scales.astype(np.float32), group, 1)[:, :cols])
        assert (np.abs(got - rows) <= steps * step + 1e-9).all()
        assert (got[rows == 0] == 0).all()
    assert codes.min() >= -127


def test_bf16_and_fp16_extremes() -> None:
    """All of fp16's range fits; values past the scales' range are refused by name."""
    for encode, full in ((encode_int4, 8), (encode_int8, 127)):
        rows = np.full((1, 32), 65504.0 * full, np.float32)
        assert np.isfinite(encode(rows, 32, "t")[1]).all()
        with pytest.raises(ModelError, match=r"^file: tensor 't'.*too large"):
            encode(rows * 1.01, 32, "file: tensor 't'")
    tiny = np.full((1, 32), 1e-45, np.float32)
    assert (decoded(*encode_int4(tiny, 32), 32, 32) >= 0).all()
    with pytest.raises(ModelError, match=r"^t: a value of 65520 does not fit fp16"):
        check_half(np.float32([65520]), "t")
    assert check_half(np.float32([65519]), "t")[0] == 65504


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (17, 40), (33, 25), (100, 300), (700, 512), (2000, 256)])
def test_blocks_equal_the_whole(dtype: str, rows: int, cols: int) -> None:
    """Block by block, in place or streamed, gives the bytes of doing all at once; gaps and padding are zero."""
    layout = MatrixLayout(rows, cols, dtype, 32 if dtype.startswith("int") else 0)
    values = RNG.normal(size=(rows, cols)).astype(np.float32)
    asked: list[tuple[int, int]] = []

    def read(first: int, last: int) -> Any:
        asked.append((first, last))
        return values[first:last]

    placed = np.zeros((layout.pages, PAGE), np.uint8)
    pack_matrix(read, layout, placed, "t")
    streamed = np.concatenate(list(stream_matrix(read, layout, "t")))
    np.testing.assert_array_equal(streamed, placed.reshape(-1))
    half = asked[: len(asked) // 2]
    assert [first for first, _ in half] == [0, *(last for _, last in half[:-1])]
    want = {"fp32": values, "fp16": values.astype(np.float16).astype(np.float32)}.get(dtype)
    if want is None:
        encode = encode_int4 if dtype == "int4" else encode_int8
        want = decoded(*encode(values, 32), 32, cols)
    np.testing.assert_array_equal(unpack(placed, layout), want)


def test_matrices_of_an_expert_do_not_touch_each_other() -> None:
    gate, up, down = expert_layouts(40, 25, "int4", 32)
    run = np.zeros((down.pages, PAGE), np.uint8)
    parts = [RNG.normal(size=shape).astype(np.float32) for shape in ((25, 40), (25, 40), (40, 25))]
    for layout, part in zip((gate, up, down), parts, strict=True):
        pack_matrix(lambda a, b, part=part: part[a:b], layout, run, "t")  # type: ignore[misc]
    for layout, part in zip((gate, up, down), parts, strict=True):
        alone = np.zeros((layout.pages, PAGE), np.uint8)
        pack_matrix(lambda a, b, part=part: part[a:b], layout, alone, "t")  # type: ignore[misc]
        np.testing.assert_array_equal(unpack(run, layout), unpack(alone, layout))


def test_a_ragged_last_group_has_its_own_scale() -> None:  # C2
    rows = RNG.normal(size=(16, 40)).astype(np.float32)
    rows[:, 32:] *= 100
    layout = MatrixLayout(16, 40, "int4", 32)
    run = np.zeros((1, PAGE), np.uint8)
    pack_matrix(lambda a, b: rows[a:b], layout, run, "t")
    codes, scales = unpack_codes(run, layout)
    assert scales.shape == (16, 2)
    assert (np.abs(scales[:, 1].astype(np.float32)) > 5 * np.abs(scales[:, 0].astype(np.float32))).all()
    assert np.abs(unpack(run, layout) - rows)[:, :32].max() < 0.6
    assert codes.max() <= 15
