"""Packing against a loop that follows the words of layout.py, one weight at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.ops.layout import GROUPS, PAGE, MatrixLayout, ceil_div
from colibri_lab.ops.pack import pack, pack_codes, pack_float, unpack, unpack_codes

from .models import FORMATS


def weight_at(run: np.ndarray, layout: MatrixLayout, row: int, col: int) -> float:
    """The weight of one row and input, found as the layout's text says."""
    tile = row // 16 * layout.tiles_per_row_group + col // layout.tile_cols
    r, k, at = row % 16, col % layout.tile_cols, layout.tile_offset(tile)
    if layout.dtype == "fp32":
        return float(run[at:].view(np.uint8)[(k * 16 + r) * 4 :][:4].view(np.float32)[0])
    if layout.dtype == "fp16":
        return float(run[at:][(k * 16 + r) * 2 :][:2].view(np.float16)[0])
    scale = run[at:][(k // layout.group * 16 + r) * 2 :][:2].view(np.float16)[0].astype(np.float32)
    codes = run[at + layout.groups_per_tile * 32 :]
    if layout.dtype == "int8":
        return float(scale * np.float32(codes[k // 4 * 64 + r * 4 + k % 4].view(np.int8)))
    byte = int(codes[k // 8 * 64 + r * 4 + k % 4])
    return float(scale * np.float32((byte & 15 if k % 8 < 4 else byte >> 4) - 8))


def random_pack(layout: MatrixLayout, out: np.ndarray, seed: int) -> tuple[np.ndarray, ...]:
    rng, shape = np.random.default_rng(seed), (layout.rows, layout.cols)
    if not layout.quantised:
        values = rng.standard_normal(shape).astype(np.float32 if layout.dtype == "fp32" else np.float16)
        pack_float(values, layout, out)
        return (values,)
    low, high, dtype = (-127, 128, np.int8) if layout.dtype == "int8" else (0, 16, np.uint8)
    codes = rng.integers(low, high, shape).astype(dtype)
    scales = rng.random((layout.rows, ceil_div(layout.cols, layout.group))).astype(np.float16)
    pack_codes(codes, scales, layout, out)
    return codes, scales


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 600),
    which=st.sampled_from(FORMATS),
    start=st.integers(0, 2 * PAGE // 64 - 1),
    seed=st.integers(0, 2**31),
)
def test_round_trip_and_place(rows, cols, which, start, seed):
    layout = MatrixLayout(rows, cols, *which, start=start * 64)
    run = np.full(layout.pages * PAGE, 0x5A, np.uint8)
    given_ = random_pack(layout, run, seed)
    if layout.quantised:
        codes, scales = unpack_codes(run, layout)
        assert np.array_equal(codes, given_[0]) and np.array_equal(scales, given_[1])
    values = unpack(run, layout)
    if not layout.quantised:
        assert np.array_equal(values, given_[0].astype(np.float32))
    rng = np.random.default_rng(seed)
    for row, col in zip(rng.integers(0, rows, 12), rng.integers(0, cols, 12), strict=True):
        assert values[row, col] == weight_at(run, layout, int(row), int(col))


@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_padding_is_zero_and_the_rest_untouched(dtype, group):
    layout = MatrixLayout(33, 300, dtype, group, start=PAGE - 3 * 64)
    run = np.full(layout.pages * PAGE, 0x5A, np.uint8)
    random_pack(layout, run, 1)
    inside = np.zeros(run.size, bool)
    for tile in range(layout.tiles):
        at = layout.tile_offset(tile)
        assert at // PAGE == (at + layout.tile_bytes - 1) // PAGE
        assert not inside[at : at + layout.tile_bytes].any()
        inside[at : at + layout.tile_bytes] = True
    assert (run[~inside] == 0x5A).all()
    whole = MatrixLayout(48, layout.tiles_per_row_group * layout.tile_cols, dtype, group, start=layout.start)
    if layout.quantised:
        codes, scales = unpack_codes(run, whole)
        assert not codes[33:].any() and not codes[:, 300:].any()
        assert not scales[33:].any() and not scales[:, ceil_div(300, group) :].any()
    else:
        values = unpack(run, whole)
        assert not values[33:].any() and not values[:, 300:].any()


def test_many_pages_and_transposed_sources():
    layout = MatrixLayout(2000, 520, "fp16", start=1024)
    values = np.random.default_rng(0).standard_normal((520, 2000)).astype(np.float32).T
    run = np.zeros(layout.pages * PAGE, np.uint8)
    pack(values, layout, run.reshape(-1, PAGE))
    assert np.array_equal(unpack(run, layout), values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("group", GROUPS)
def test_wrong_input_is_named(group):
    layout = MatrixLayout(16, 256, "int4", group)
    codes, scales = np.zeros((16, 256), np.uint8), np.zeros((16, 256 // group), np.float16)
    run = np.zeros(PAGE, np.uint8)
    with pytest.raises(ValueError, match="codes of shape"):
        pack_codes(codes[:, :-1], scales, layout, run)
    with pytest.raises(ValueError, match="scales of shape"):
        pack_codes(codes, scales[:, :-1], layout, run)
    with pytest.raises(ValueError, match="must be uint8"):
        pack_codes(codes.astype(np.int8), scales, layout, run)
    with pytest.raises(ValueError, match="use pack_codes"):
        pack_float(codes, layout, run)
    with pytest.raises(ValueError, match="use pack_float"):
        pack_codes(codes, scales, MatrixLayout(16, 256, "fp16"), run)
    with pytest.raises(ValueError, match="cannot hold"):
        pack_codes(codes, scales, layout, run[: layout.end - 1])
    with pytest.raises(ValueError, match="contiguous uint8"):
        unpack(np.zeros((PAGE, 2), np.uint8)[:, 0], layout)
