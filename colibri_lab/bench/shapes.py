"""Models of random weights, the same numbers for us and for a peer. Standard library and NumPy only: a peer's own
interpreter reads this file too.

A matrix is drawn as 4-bit codes q with one fp16 scale for 32 inputs, value scale * (q - 8). That is our int4 at group
32 and llama.cpp's Q4_0 at once, so both engines multiply the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

GROUP = 32
BYTES_PER_WEIGHT = 18 / 32  # 16 bytes of codes and a 2-byte scale for 32 weights


@dataclass(frozen=True)
class Shape:
    """A Qwen3-MoE: per-head query and key norms, untied head, top-k weights that sum to 1.

    branch: None draws codes from -8 to 7, whose mean of -1/2 adds up to one direction that all tokens share, so routes
    hardly change from token to token. Otherwise codes have mean 0, so tokens keep their own directions and go to
    experts of their own; attention and experts add `branch` of a unit vector each to the stream, which says how much a
    layer's gate knows of the next layer's choice.
    """

    name: str
    hidden: int
    layers: int
    experts: int
    top_k: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 32000
    positions: int = 4096
    theta: float = 1e6
    norm_eps: float = 1e-6
    branch: float | None = None

    @property
    def active_bytes(self) -> float:
        """Bytes of weights that one decoded token must read: attention, router, top-k experts, head."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden * BYTES_PER_WEIGHT
        experts = self.top_k * 3 * self.hidden * self.ffn * BYTES_PER_WEIGHT
        router = self.experts * self.hidden * 4
        return self.layers * (attention + experts + router) + self.vocab * self.hidden * BYTES_PER_WEIGHT

    @property
    def operations(self) -> float:
        """Multiplications and additions of a token's matrices: two a weight (the head is the last token's alone)."""
        matrices = 2 * (self.heads + self.kv_heads) * self.head_dim + self.top_k * 3 * self.ffn + self.experts
        return 2.0 * self.layers * self.hidden * matrices

    @property
    def expert_bytes(self) -> float:
        """Bytes of all routed experts, without padding."""
        return self.layers * self.experts * 3 * self.hidden * self.ffn * BYTES_PER_WEIGHT


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("nano", 256, 2, 8, 2, 256, 4, 2, 64, vocab=1024, positions=1024),
        Shape("m0", 512, 8, 16, 4, 512, 8, 2, 64),
        Shape("m1", 1024, 16, 32, 4, 768, 16, 4, 64),
        Shape("m2", 2048, 16, 32, 4, 1024, 16, 4, 128),
        # next_gate foresees of it what it foresees of the embedded model's experts (`bench paging`)
        Shape("m2-routed", 2048, 16, 32, 4, 1024, 16, 4, 128, branch=0.6),
        Shape("olmoe", 2048, 16, 64, 8, 1024, 16, 16, 128, vocab=50304),
        Shape("mixtral-layer", 4096, 1, 8, 2, 14336, 32, 8, 128, vocab=1024),  # its vocabulary would hide the layer
        Shape("qwen3-layer", 2048, 1, 128, 8, 768, 32, 4, 128, vocab=1024),
    )
}


class Role(IntEnum):
    """Which matrix; part of its random seed."""

    EMBEDDING = 0
    HEAD = 1
    Q = 2
    K = 3
    V = 4
    O = 5  # noqa: E741
    ROUTER = 6
    GATE = 7
    UP = 8
    DOWN = 9


@dataclass(frozen=True)
class Q4:
    """A drawn matrix [N, K]: scales [N, K/32], nibbles [N, K/32, 16] (byte j: input j low, input j + 16 high)."""

    nibbles: NDArray[np.uint8]
    scales: NDArray[np.float16]

    def codes(self) -> NDArray[np.uint8]:
        """uint8 [N, K], 0..15."""
        n, blocks, _ = self.nibbles.shape
        both = np.concatenate((self.nibbles & 15, self.nibbles >> 4), axis=-1)
        return both.reshape(n, blocks * GROUP)

    def values(self) -> NDArray[np.float32]:
        """float32 [N, K]"""
        wide = np.repeat(self.scales.astype(np.float32), GROUP, axis=1)
        return wide * (self.codes().astype(np.float32) - np.float32(8))

    def q4_0(self) -> NDArray[np.uint8]:
        """uint8 [N, K/32 * 18]: the fp16 scale, then the 16 bytes, of each block."""
        n, blocks, _ = self.nibbles.shape
        out = np.empty((n, blocks, 18), np.uint8)
        out[..., :2] = self.scales.view(np.uint8).reshape(n, blocks, 2)
        out[..., 2:] = self.nibbles
        return out.reshape(n, blocks * 18)


def rows_cols(shape: Shape, role: Role) -> tuple[int, int]:
    """[N, K] of a matrix of this role."""
    h, d = shape.hidden, shape.head_dim
    return {
        Role.EMBEDDING: (shape.vocab, h),
        Role.HEAD: (shape.vocab, h),
        Role.Q: (shape.heads * d, h),
        Role.K: (shape.kv_heads * d, h),
        Role.V: (shape.kv_heads * d, h),
        Role.O: (h, shape.heads * d),
        Role.ROUTER: (shape.experts, h),
        Role.GATE: (shape.ffn, h),
        Role.UP: (shape.ffn, h),
        Role.DOWN: (h, shape.ffn),
    }[role]


def draw(shape: Shape, role: Role, layer: int = 0, expert: int = 0, seed: int = 0) -> Q4:
    """The matrix of this role, layer and expert: rows of unit variance in, about unit variance out."""
    n, k = rows_cols(shape, role)
    blocks = k // GROUP
    bits = np.random.PCG64([seed, int(role), layer, expert])
    nibbles = bits.random_raw(n * blocks * 2).view(np.uint8).reshape(n, blocks, 16)
    jitter = bits.random_raw(-(-n * blocks // 8)).view(np.uint8)[: n * blocks].reshape(n, blocks)
    gain = np.sqrt(k) if role is Role.EMBEDDING else 1.0  # 4.61: standard deviation of q - 8
    if shape.branch is not None:
        nibbles |= (nibbles & 0x0F == 0) * np.uint8(0x08) | (nibbles & 0xF0 == 0) * np.uint8(0x80)  # -8 becomes 0
        gain *= shape.branch if role in (Role.O, Role.DOWN) else 1.0
    scales = np.float32(gain / (4.61 * np.sqrt(k))) * (
        np.float32(0.8) + jitter.astype(np.float32) * np.float32(0.4 / 255)
    )
    return Q4(nibbles, scales.astype(np.float16))


def draw_router(shape: Shape, layer: int, seed: int = 0) -> NDArray[np.float32]:
    """float32 [E, H], uniform with variance 1 / H."""
    bits = np.random.PCG64([seed, int(Role.ROUTER), layer, 0])
    raw = bits.random_raw(shape.experts * shape.hidden) >> np.uint64(40)
    unit = raw.astype(np.float64) / 2**24 - 0.5
    drawn: NDArray[np.float32] = (unit * np.sqrt(12 / shape.hidden)).astype(np.float32)
    return drawn.reshape(shape.experts, shape.hidden)
