"""From float32 rows to packed pages.

Round to nearest, with the scale of each group chosen for the least squared error.

int4: scale = m / d, code = round(x / scale) + 8 in 0..15, where m is the group's value of largest magnitude, with its
sign. d is -8 (m gets the code of full scale), 7 or -8.5 (m is clipped a little and the rest gets finer steps):
whichever leaves the least squared error, -8 on a tie. So weights that are codes times a power of two, with one at
full scale, come back exactly. int8: scale = max|x| / 127. Scales are fp16; codes are chosen for the scale as stored.

Shape legend: n rows of a block, K inputs, g group, B = ceil(K / g).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.errors import ModelError
from ..ops import encode
from ..ops.layout import PAGE, ROWS, MatrixLayout, ceil_div
from ..ops.pack import pack_codes, pack_float

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
RowsOf = Callable[[int, int], F32]  # (first, last) -> rows [last - first, K]
BLOCK = 1 << 16  # weights handled at once: fits a core's cache, and bounds memory whatever the matrix
DIVISORS = (-8.0, 7.0, -8.5)
HALF_MAX = 65504.0


def encode_int4(rows: F32, group: int, name: str = "") -> tuple[U8, NDArray[np.float16]]:
    """codes uint8 [n, K] and scales fp16 [n, B] of rows [n, K]. ModelError when a scale does not fit fp16.

    The reference of kernels/cpu/quantise.c, which gives the same bits.
    """
    values = _columns(rows, group)  # [g, n * B]
    high, low = values.max(0), values.min(0)
    full = np.where(-low >= high, low, high)  # with its sign
    best = scale = error = np.empty(0, np.float32)
    for divisor in DIVISORS:
        most = np.float32(
            HALF_MAX * abs(divisor)
        )  # where -8 just fits fp16, 7 may not: then it is a bad choice, no error
        reach = full if divisor == DIVISORS[0] else np.clip(full, -most, most)
        codes, trial = _nearest(values, reach / np.float32(divisor), -8, 7, name)
        off = codes * trial
        off -= values
        off *= off
        squares = off[0]
        for row in off[1:]:  # in this order, which a kernel can repeat
            squares += row
        if not error.size:
            best, scale, error = codes, trial, squares
        elif (better := squares < error).any():
            np.copyto(best, codes, where=better)
            np.copyto(scale, trial, where=better)
            np.minimum(error, squares, out=error)
        if not error.any():
            break
    best += np.float32(8)
    return _rows(best.astype(np.uint8), rows), scale.astype(np.float16).reshape(rows.shape[0], -1)


def encode_int8(rows: F32, group: int, name: str = "") -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """codes int8 [n, K] in -127..127 and scales fp16 [n, B] of rows [n, K].

    ModelError when a scale does not fit fp16.
    """
    values = _columns(rows, group)
    codes, scale = _nearest(values, np.maximum(values.max(0), -values.min(0)) / np.float32(127), -127, 127, name)
    return _rows(codes.astype(np.int8), rows), scale.astype(np.float16).reshape(rows.shape[0], -1)


def _nearest(values: F32, exact: F32, low: int, high: int, name: str) -> tuple[F32, F32]:
    """Codes low..high of values [g, m] and the scales [m] as stored."""
    scale = _half(exact + np.float32(0), name)  # a zero without a sign
    step: F32 = np.where(scale == 0, np.float32(1), scale)
    codes = values / step
    np.rint(codes, codes)
    np.clip(codes, low, high, codes)
    return codes, scale


def _half(scale: F32, name: str) -> F32:
    """Scales as fp16 can hold them.

    Below fp16's normal range they are rounded up, so that the largest value still fits.
    """
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    if not np.isfinite(half).all():
        raise ModelError(f"{name}: values are too large for the fp16 scales of int4 and int8: use --quantize fp32")
    short = (np.abs(half) < np.abs(scale)) & (np.abs(scale) < 6.2e-5)
    if short.any():
        half = np.where(short, np.nextafter(half, np.copysign(np.float16(np.inf), scale.astype(np.float16))), half)
    return half.astype(np.float32)


def _columns(rows: F32, group: int) -> F32:
    """rows [n, K] as [g, n * B], a column a group: all that follows then runs along memory.

    A short last group gets zeros.
    """
    count, cols = rows.shape
    groups = ceil_div(cols, group)
    if cols != groups * group:
        rows = np.pad(rows, ((0, 0), (0, groups * group - cols)))
    return np.ascontiguousarray(rows.reshape(count * groups, group).T)


def _rows(columns: NDArray[Any], like: F32) -> NDArray[Any]:
    """Codes [g, n * B] back in the shape of the rows that they came from."""
    count, cols = like.shape
    return np.ascontiguousarray(columns.T.reshape(count, -1)[:, :cols])


def check_half(values: F32, name: str) -> NDArray[np.float16]:
    """values as fp16; ModelError, naming the tensor, when one does not fit."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise ModelError(f"{name}: a value of {float(np.abs(values).max()):.6g} does not fit fp16: use --quantize fp32")
    return half


def pack_rows(rows: F32, layout: MatrixLayout, out: U8, name: str) -> None:
    """Quantise rows [N, K] as the layout says and write them into its tiles in `out`."""
    if layout.dtype == "int4":
        coded = encode.encode_int4(rows, layout.group) or encode_int4(rows, layout.group, name)
        pack_codes(*coded, layout, out)
    elif layout.dtype == "int8":
        pack_codes(*encode_int8(rows, layout.group, name), layout, out)
    else:
        pack_float(check_half(rows, name) if layout.dtype == "fp16" else rows, layout, out)


def pack_matrix(read: RowsOf, layout: MatrixLayout, out: U8, name: str, pool: Executor | None = None) -> None:
    """Quantise a whole matrix, block by block, into its place in a run of pages `out` [G, 65536] or flat.

    pool: threads that share the blocks; `read` must then be safe to call from several. The bytes are the same either
    way.
    """
    flat = out.reshape(-1)

    def work(block: tuple[int, int, MatrixLayout, int]) -> None:
        first, last, part, base = block
        pack_rows(read(first, last), part, flat[base:], name)

    blocks = list(_blocks(layout))
    for _ in map(work, blocks) if pool is None or len(blocks) == 1 else pool.map(work, blocks):
        pass


def stream_matrix(read: RowsOf, layout: MatrixLayout, name: str) -> Iterator[U8]:
    """The run of pages of a matrix that begins at its first byte, in pieces, without ever holding all of it."""
    done = 0
    for first, last, part, base in _blocks(layout):
        piece = np.zeros(part.end, np.uint8)
        pack_rows(read(first, last), part, piece, name)
        if base > done:  # the gap at the end of the page before
            yield np.zeros(base - done, np.uint8)
            done = base
        yield piece[done - base :]
        done = base + part.end
    yield np.zeros(layout.pages * PAGE - done, np.uint8)


def _blocks(layout: MatrixLayout) -> Iterator[tuple[int, int, MatrixLayout, int]]:
    """(first row, last row, layout of these rows alone, byte of the page where that layout begins) for BLOCK weights
    each.
    """
    step = max(1, BLOCK // (ROWS * layout.cols)) * ROWS
    for first in range(0, layout.rows, step):
        last = min(first + step, layout.rows)
        at = layout.tile_offset(first // ROWS * layout.tiles_per_row_group)
        part = MatrixLayout(last - first, layout.cols, layout.dtype, layout.group, start=at % PAGE)
        yield first, last, part, at - at % PAGE


def blocks_of(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """(first, last) rows of plain values, BLOCK at once."""
    step = max(1, BLOCK // max(cols, 1))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
