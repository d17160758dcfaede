"""Launches of the first half of a layer: keys and values to the pool, attention through its table, the projections.

Shape legend as in types.py. The arrays of the pool are the device's own: the host's hold tables alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .launch import LANE_DIMS, Kernels
from .layout import ceil_div
from .products import Activations, Jobs, Residents, Vectors, upload
from .types import AttentionWeights, KVPool, LayerWeights, ModelWeights

SPLIT = 256  # tokens of a block of attention, as in attention.cu
WARPS = 8  # of a block that sums over a row; one float of shared memory each
NO_NORM, PER_HEAD, FLAT = 0, 1, 2  # as in project_heads.cu


@dataclass(frozen=True)
class Lines:
    """A layer's rows: n of them from `at` of the residual stream, whose keys and values wait from `staging` on.

    On the device: seat, position, status int32 [n]; a row's tokens are sight[begin[r]:][:count[r]], begin int64 [n],
    count int32 [n]. splits: blocks that share a row's tokens, enough for the longest.
    """

    n: int
    at: int
    staging: int
    jobs: Jobs
    seat: Any
    position: Any
    status: Any
    sight: Any
    begin: Any
    count: Any
    splits: int


class Attention:
    """Room for `capacity` rows and the pool; `spare`: tokens that wait behind it, for rows of several layers at once.

    where and first have a seat more than the host's, for rows that only fill up a batch.
    """

    def __init__(self, kernels: Kernels, w: ModelWeights, kv: KVPool, capacity: int, spare: int,
                 residents: Residents, vectors: Vectors) -> None:  # fmt: skip
        self._kernels, self._w, self._residents, self._vectors = kernels, w, residents, vectors
        d, self._layers, self._half = kernels.device, len(w.layers), "half_t" if kv.k.dtype == np.float16 else "float"
        tokens, self._kv_heads, dim = kv.k.shape
        self.tokens, self.positions = tokens + spare, kv.where.shape[2]
        self.k, self.v = (d.empty((self.tokens, self._kv_heads, dim), kv.k.dtype) for _ in range(2))
        self.where, self.first = (d.empty((len(a) + 1, *a.shape[1:]), a.dtype) for a in (kv.where, kv.first))
        for room, host in ((self.k, kv.k), (self.v, kv.v), (self.where, kv.where), (self.first, kv.first)):
            d.write(room[: len(host)], host)
        self._cos, self._sin = upload(d, w.cos), upload(d, w.sin)
        heads = max(layer.attention.heads for layer in w.layers)
        qkv = max(layer.attention.qkv.layout.rows for layer in w.layers)
        self._normed, self._out = (d.empty((capacity, w.hidden), np.float32) for _ in range(2))
        self._qkv, self._attended = (d.empty((capacity * n,), np.float32) for n in (qkv, heads * dim))
        self._parts = d.empty((capacity * ceil_div(self.positions, SPLIT) * heads * (2 + dim),), np.float32)

    def project(self, layer: int, x: Any, lines: Lines, acts: Activations) -> None:
        """Queries stay here; keys and values go to staging, and the tables say so. x: the residual stream."""
        w, block, n = self._w, self._w.layers[layer], lines.n
        a = block.attention
        self._kernels("rms_norm", (n, 1, 1), 256, x, self._residents.rows[lines.at :], self._vectors(block.input_norm),
                      self._normed, w.hidden, w.norm_eps, shared=4 * WARPS)  # fmt: skip
        acts.multiply(self._normed, self._residents.matrix(a.qkv), n, lines.jobs, self._qkv)
        norms = [NO_NORM if v is None else PER_HEAD if len(v) == a.head_dim else FLAT for v in (a.q_norm, a.k_norm)]
        self._kernels(f"project_heads<{self._half}>", (n, 1, 1), 128, self._qkv, self._vectors(a.qkv_bias),
                      self._vectors(a.q_norm), self._vectors(a.k_norm), self._cos, self._sin, lines.seat,
                      lines.position, self.k, self.v, self.where, self.first, a.heads, a.kv_heads, a.head_dim, *norms,
                      w.norm_eps, np.inf if a.clip is None else a.clip, layer, self._layers, self.positions,
                      lines.staging, shared=4 * WARPS)  # fmt: skip

    def attend(self, layer: int, x: Any, ffn_in: Any, lines: Lines, acts: Activations) -> None:
        """x += attention of the rows; ffn_in = x normed. Both from the first row on."""
        w, block, n = self._w, self._w.layers[layer], lines.n
        a = block.attention
        self._mix(a, lines)
        acts.multiply(self._attended, self._residents.matrix(a.o), n, lines.jobs, self._out)
        self._kernels("add_rms_norm", (n, 1, 1), 256, x, self._out, self._vectors(a.o_bias),
                      self._vectors(block.post_norm), ffn_in, w.hidden, w.norm_eps, shared=4 * WARPS)  # fmt: skip

    def _mix(self, a: AttentionWeights, lines: Lines) -> None:
        wide, n = 2 + a.head_dim, lines.n
        lanes = next(m for m in LANE_DIMS if 32 * m >= a.head_dim)
        self._kernels(f"attention<{self._half}, {lanes}>", (lines.splits, a.heads, n), 128, self._qkv, self.k, self.v,
                      lines.sight, lines.begin, lines.count, self._parts, lines.status, a.heads, a.kv_heads, a.head_dim,
                      (a.heads + 2 * a.kv_heads) * a.head_dim, self.tokens, a.scale, shared=4 * 4 * wide)  # fmt: skip
        self._kernels("attention_merge", (a.heads, n, 1), 128, self._parts, lines.count, self._attended, a.heads,
                      a.head_dim, lines.splits)  # fmt: skip

    def settle(self, target: Any, seat: Any, position: Any, expert: Any, n: int, staging: int, layer: int = 0,
               layers: int = 1, apart: int = 0) -> None:  # fmt: skip
        """K/V of n rows to `target`, in the tables on the device too; target, expert int32 [layers, n]; layers from
        `layer` on, whose stagings lie `apart` tokens from each other."""
        width = self._kv_heads * self.k.shape[2]
        self._kernels(f"settle_rows<{self._half}>", (n, layers, 1), 128, self.k, self.v, target, seat, position, expert,
                      self.where, self.first, width, layer, self._layers, self.positions, staging, apart)  # fmt: skip

    def products(self, capacity: int) -> list[tuple[int, Any]]:
        """(most inputs, matrix) of the products here, for Activations."""
        attentions = [layer.attention for layer in self._w.layers]
        return [(capacity, self._residents.matrix(m)) for a in attentions for m in (a.qkv, a.o)]

    def begins(self, layer: int, seat: np.ndarray[Any, Any], start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """int64: where the lists of some seats begin in `where`, from position `start` on."""
        lists: np.ndarray[Any, Any] = (seat.astype(np.int64) * self._layers + layer) * self.positions + start
        return lists


def starts(block: LayerWeights, past: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first position that a row of `past` tokens (its own among them) sees in a layer."""
    window = block.attention.window
    begin: np.ndarray[Any, Any] = np.maximum(past - window, 0) if window else np.zeros(past.shape, past.dtype)
    return begin
