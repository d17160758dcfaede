"""int4 codes of weights by the CPU kernels (kernels/cpu/quantise.c); convert/quantise.py has the reference."""

from __future__ import annotations

import ctypes as c
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .build import KernelError
from .cpu import open_library
from .layout import ceil_div

MOST_GROUP = 128


@cache
def _kernel() -> Any:
    """The function of the best ISA level; None where kernels cannot be compiled."""
    try:
        function = open_library()[1].colibri_encode_int4
    except KernelError:
        return None
    function.argtypes = [c.c_void_p, c.c_int64, c.c_int64, c.c_int, c.c_void_p, c.c_void_p]
    function.restype = c.c_int
    return function


def encode_int4(
    rows: NDArray[np.float32], group: int, library: Any = None
) -> tuple[NDArray[np.uint8], NDArray[np.float16]] | None:
    """codes uint8 [n, K] 0..15 and scales fp16 [n, ceil(K / group)] of finite rows [n, K]; Python's lock is free.

    None where the reference must answer: no kernels, or a scale that does not fit fp16. library: of another ISA level.
    """
    kernel = _kernel() if library is None else library.colibri_encode_int4
    if kernel is None or group > MOST_GROUP:
        return None
    x = np.ascontiguousarray(rows, np.float32)
    n, cols = x.shape
    codes = np.empty((n, cols), np.uint8)
    scales = np.empty((n, ceil_div(cols, group)), np.float16)
    if not kernel(x.ctypes.data, n, cols, group, codes.ctypes.data, scales.ctypes.data):
        return None
    return codes, scales
