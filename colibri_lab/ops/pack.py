"""Between plain arrays and the tiles of `layout.py`, vectorised over whole matrices.

Shape legend: N rows, K inputs, g group, B = ceil(K / g) groups a row, J row groups of 16, I tiles along K, T tile_cols.
Which code and which scale a weight gets is the converter's choice; here bytes only move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layout import PAGE, ROWS, MatrixLayout, ceil_div

Array = NDArray[Any]
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def pack_float(values: Array, layout: MatrixLayout, out: U8) -> None:
    """Write values [N, K] into the fp32 or fp16 tiles of `out`, rounding to nearest even.

    out: uint8, the run of pages (flat or [G, PAGE]), at least layout.end bytes. Padding inside tiles becomes 0; bytes
    outside tiles stay as they are. ValueError when shapes or dtypes do not fit.
    """
    if layout.quantised:
        raise ValueError(f"{layout.dtype} tiles take codes and scales: use pack_codes")
    _check(values.shape, (layout.rows, layout.cols), "values")
    dtype = np.dtype(np.float32 if layout.dtype == "fp32" else np.float16)
    for first, tiles in _strips(layout, out):
        rows = np.asarray(values[first * ROWS : first * ROWS + tiles.rows])
        with np.errstate(over="ignore"):  # past 65504 fp16 gives inf; the converter decides whether that is an error
            block = _padded(rows, layout, dtype)  # [J, 16, I, T]
        tiles.write(0, block.transpose(0, 2, 3, 1))


def pack_codes(codes: Array, scales: Array, layout: MatrixLayout, out: U8) -> None:
    """Write codes [N, K] and scales [N, B] into the int8 or int4 tiles of `out`.

    codes: int8 -127..127 for int8, uint8 0..15 for int4. scales: converted to fp16 as they are. Else as pack_float.
    """
    if not layout.quantised:
        raise ValueError(f"{layout.dtype} tiles take plain values: use pack_float")
    code_dtype = np.dtype(np.int8 if layout.dtype == "int8" else np.uint8)
    if codes.dtype != code_dtype:
        raise ValueError(f"codes of {layout.dtype} must be {code_dtype}, not {codes.dtype}")
    _check(codes.shape, (layout.rows, layout.cols), "codes")
    _check(scales.shape, (layout.rows, ceil_div(layout.cols, layout.group)), "scales")
    for first, tiles in _strips(layout, out):
        part = slice(first * ROWS, first * ROWS + tiles.rows)
        steps = _padded(scales[part], layout, np.dtype(np.float16), layout.groups_per_tile)  # [J, 16, I, T/g]
        tiles.write(0, steps.transpose(0, 2, 3, 1))
        words = _padded(codes[part], layout, code_dtype).view(np.uint32)  # [J, 16, I, T/4], four codes a word
        if layout.dtype == "int4":  # codes 8c..8c+3 low, 8c+4..8c+7 high: no code crosses its byte
            words = words[..., 0::2] | (words[..., 1::2] << np.uint32(4))
        tiles.write(layout.groups_per_tile * ROWS * 2, words.transpose(0, 2, 3, 1))


def pack(values: Array, layout: MatrixLayout, out: U8, scales: Array | None = None) -> None:
    """pack_float, or with scales pack_codes."""
    if scales is None:
        pack_float(values, layout, out)
    else:
        pack_codes(values, scales, layout, out)


def unpack(run: U8, layout: MatrixLayout) -> F32:
    """float32 [N, K] out of a run of pages: scale * q in float32 for int8 and int4."""
    if layout.quantised:
        codes, scales = unpack_codes(run, layout)
        wide = np.repeat(scales.astype(np.float32), layout.group, axis=1)[:, : layout.cols]
        offset = 8 if layout.dtype == "int4" else 0
        return wide * (codes.astype(np.float32) - np.float32(offset))
    dtype = np.dtype(np.float32 if layout.dtype == "fp32" else np.float16)
    tiles = _gather(run, layout).view(dtype).reshape(*_grid(layout), layout.tile_cols, ROWS)
    return _rows(tiles.transpose(0, 3, 1, 2), layout.rows, layout.cols).astype(np.float32)


def unpack_codes(run: U8, layout: MatrixLayout) -> tuple[Array, NDArray[np.float16]]:
    """codes [N, K] (int8, or uint8 for int4) and scales float16 [N, B] out of a run of pages."""
    split = layout.groups_per_tile * ROWS * 2
    tiles = _gather(run, layout)
    scales = np.ascontiguousarray(tiles[:, :split]).view(np.float16)
    scales = scales.reshape(*_grid(layout), layout.groups_per_tile, ROWS).transpose(0, 3, 1, 2)
    words = np.ascontiguousarray(tiles[:, split:]).view(np.uint32).reshape(*_grid(layout), -1, ROWS)
    words = np.ascontiguousarray(words.transpose(0, 3, 1, 2))  # [J, 16, I, T/4 or T/8]
    if layout.dtype == "int4":
        low = words & np.uint32(0x0F0F0F0F)
        high = (words >> np.uint32(4)) & np.uint32(0x0F0F0F0F)
        words = np.stack([low, high], axis=-1)
    codes = words.view(np.int8 if layout.dtype == "int8" else np.uint8)
    codes = codes.reshape(layout.row_groups, ROWS, layout.tiles_per_row_group, layout.tile_cols)
    groups = ceil_div(layout.cols, layout.group)
    return _rows(codes, layout.rows, layout.cols), _rows(scales, layout.rows, groups)


class _Strip:
    """The tiles of some row groups inside a run of pages."""

    def __init__(self, layout: MatrixLayout, flat: U8, first: int, row_groups: int) -> None:
        self.layout, self.flat = layout, flat
        self.first = first * layout.tiles_per_row_group
        self.count = row_groups * layout.tiles_per_row_group
        self.rows = min(row_groups * ROWS, layout.rows - first * ROWS)

    def write(self, at: int, block: Array) -> None:
        """Copy block [J, I, ...] to byte `at` of each tile."""
        data = np.ascontiguousarray(block).view(np.uint8).reshape(self.count, -1)
        for tile, view in _runs(self.layout, self.flat, self.first, self.count):
            part = data[tile : tile + view.shape[0] * view.shape[1]]
            view[..., at : at + data.shape[1]] = part.reshape(view.shape[0], view.shape[1], -1)


def _strips(layout: MatrixLayout, out: U8) -> Iterator[tuple[int, _Strip]]:
    """(first row group, its tiles) in strips small enough for the processor's cache: 4x faster than all at once."""
    flat = _flat(out, layout)
    step = max(1, (1 << 18) // (layout.tiles_per_row_group * layout.tile_cols * ROWS))
    for first in range(0, layout.row_groups, step):
        yield first, _Strip(layout, flat, first, min(step, layout.row_groups - first))


def _runs(layout: MatrixLayout, flat: U8, first: int, count: int) -> Iterator[tuple[int, Array]]:
    """(tile - first, view [pages, tiles, tile_bytes]): a part of a page, whole pages, a part of a page."""
    size, per_page = layout.tile_bytes, layout.tiles_per_page
    tile, end = first, first + count
    while tile < end:
        at = layout.tile_offset(tile)
        here = min((PAGE - at % PAGE) // size, end - tile)
        pages = (end - tile) // per_page if at % PAGE == 0 else 0
        if pages > 1:
            block = flat[at : at + (pages - 1) * PAGE + per_page * size]
            view = np.lib.stride_tricks.as_strided(block, (pages, per_page, size), (PAGE, size, 1))
            yield tile - first, view
            tile += pages * per_page
        else:
            yield tile - first, flat[at : at + here * size].reshape(1, here, size)
            tile += here


def _gather(run: U8, layout: MatrixLayout) -> U8:
    """A copy of all tiles without the gaps between pages, [tiles, tile_bytes]."""
    tiles = np.empty((layout.tiles, layout.tile_bytes), np.uint8)
    for tile, view in _runs(layout, _flat(run, layout), 0, layout.tiles):
        tiles[tile : tile + view.shape[0] * view.shape[1]] = view.reshape(-1, layout.tile_bytes)
    return tiles


def _grid(layout: MatrixLayout) -> tuple[int, int]:
    return layout.row_groups, layout.tiles_per_row_group


def _padded(rows: Array, layout: MatrixLayout, dtype: np.dtype[Any], width: int = 0) -> Array:
    """rows [n, k] as [J, 16, I, width], zeros where there is no weight. width: entries a tile and row, default T."""
    width = width or layout.tile_cols
    n, k = rows.shape
    groups, across = ceil_div(n, ROWS), layout.tiles_per_row_group
    if n == groups * ROWS and k == across * width:
        full = np.ascontiguousarray(rows, dtype)
    else:
        full = np.zeros((groups * ROWS, across * width), dtype)
        full[:n, :k] = rows
    return full.reshape(groups, ROWS, across, width)


def _rows(block: Array, rows: int, cols: int) -> Array:
    """[J, 16, I, width] back to [rows, cols]."""
    groups, sixteen, across, width = block.shape
    return np.ascontiguousarray(block.reshape(groups * sixteen, across * width)[:rows, :cols])


def _flat(run: U8, layout: MatrixLayout) -> U8:
    if run.dtype != np.uint8 or not run.flags.c_contiguous:
        raise ValueError("a run of pages must be contiguous uint8")
    flat = run.reshape(-1)
    if flat.size < layout.end:
        raise ValueError(f"a run of {flat.size} bytes cannot hold a matrix that ends at {layout.end}")
    return flat


def _check(shape: tuple[int, ...], want: tuple[int, int], what: str) -> None:
    if tuple(shape) != want:
        raise ValueError(f"{what} of shape {tuple(shape)} do not fit the layout, which wants {want}")
