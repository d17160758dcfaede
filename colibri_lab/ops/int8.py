"""The oracle's products of int8 or int4 weights with int8 activations, in NumPy. Shape legend as in types.py."""

from __future__ import annotations

import numpy as np

from .layout import MatrixLayout, ceil_div
from .pack import unpack_codes
from .types import F32, U8


def quantise_row(x: F32, group: int) -> tuple[F32, F32]:
    """x [K] as int8 codes (in float32) [B, g] and scales [B]: scale = absmax / 127, codes rounded to nearest even."""
    padded = np.zeros(ceil_div(len(x), group) * group, np.float32)
    padded[: len(x)] = x
    blocks = padded.reshape(-1, group)
    top = np.abs(blocks).max(axis=1)
    fine = (top >= np.float32(1e-30)) & np.isfinite(top)
    inverse = np.where(fine, np.float32(127) / np.where(fine, top, np.float32(1)), np.float32(0))
    codes = np.rint(np.where(fine[:, None], blocks, np.float32(0)) * inverse[:, None])
    scales = np.where(fine, top / np.float32(127), np.where(np.isfinite(top), np.float32(0), np.float32(np.nan)))
    return codes, scales.astype(np.float32)


def matmul_int8(run: U8, layout: MatrixLayout, x: F32) -> F32:
    """W x with int8 activations: exact integer dots per group, then float32 sums over groups in order."""
    codes, scales = unpack_codes(run, layout)
    wide = np.zeros((layout.rows, scales.shape[1] * layout.group), np.float32)
    wide[:, : layout.cols] = codes
    if layout.dtype == "int4":
        wide[:, : layout.cols] -= 8
    q, steps = quantise_row(x, layout.group)
    dots = np.einsum("nbg,bg->nb", wide.reshape(layout.rows, -1, layout.group), q)  # below 2^24, so exact in float32
    out = np.zeros(layout.rows, np.float32)
    for b in range(scales.shape[1]):
        out += scales[:, b].astype(np.float32) * steps[b] * dots[:, b]
    return out
