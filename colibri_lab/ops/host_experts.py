"""Experts that stay on the processor: its kernels on the picks of a step, whose results go to the device.

A pick is one row and one expert. To the CPU backend it is a row of its own with that expert at weight one, so what
comes out is the expert's network alone, in the bits that the device's kernels give.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .cpu import CpuBackend
from .layout import PAGE, MatrixLayout
from .types import F32, I32, ExpertPages, KVPool, Matrix, ModelWeights, Rows


class HostExperts:
    """Room for `most` picks. KernelError where the CPU's kernels cannot be built."""

    def __init__(self, w: ModelWeights, pages: ExpertPages, most: int, precision: str, threads: int | None) -> None:
        self._experts = w.experts
        self._cpu = CpuBackend(precision, threads)
        head = Matrix(MatrixLayout(1, w.hidden, "fp32"), _aligned(MatrixLayout(1, w.hidden, "fp32").pages * PAGE))
        layers = tuple(replace(layer, shared=None, shared_gate=None) for layer in w.layers)
        only = replace(w, vocab=1, top_k=1, layers=layers, head=head, embedding=None, routing=None)
        a = w.layers[0].attention
        shape = (len(w.layers), 1)
        nothing = np.zeros((2 * most, a.kv_heads, a.head_dim), np.float16)  # keys and values that nobody looks at
        kv = KVPool(nothing, nothing.copy(), np.zeros((1, *shape), np.int32), np.zeros((1, *shape), np.int16), most,
                    np.zeros((len(w.layers), 4), np.int64))  # fmt: skip
        self._rows = Rows.allocate(most, w.hidden, w.experts, 1, 1)
        self._rows.weights[:] = 1
        self._cpu.bind(only, kv, pages, self._rows)

    def run(self, layer: int, x: F32, experts: I32) -> F32:
        """[P, H] what expert experts[p] makes of x[p]; valid until the next call. MissingPage."""
        n, rows = len(experts), self._rows
        rows.ffn_in[:n], rows.experts[:n, 0], rows.x[:n] = x, experts, 0
        self._cpu.expert_ffn(layer, n, 0, self._experts)
        return rows.x[:n]

    def close(self) -> None:
        self._cpu.close()


def _aligned(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    block = np.zeros(size + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size]
