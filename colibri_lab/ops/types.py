"""What a backend is given and what it must do: plain arrays, no model, no pager.

Shape legend: R rows of a step (a row is one token of one sequence), H hidden, L layers, E experts, k top-k,
V vocabulary, S sequence seats, P positions, D head_dim, KVH key/value heads, G pages of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .layout import MatrixLayout
from .routing import Routing

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

ON_GPU, ON_CPU, BY_HEAT = range(3)  # where an expert is computed; the order of placement.PLACES
ABSENT, COMING = -1, -2  # entries of a page table that are no frame: not in memory; not yet, but on its way


# Counters of attention: tokens that were read, and that exact attention would have read; rows whose experts were
# guessed, and how many of them then chose a guessed expert first.
SEEN = ("read", "exact", "guessed", "recalled")
# What backends take the time of: attn_router's router, and grouping rows by expert in expert_ffn.
SPENT = ("router", "dispatch")


@dataclass(frozen=True)
class Matrix:
    """A resident matrix: its layout and its run of pages (uint8, 64-byte aligned, contiguous, whole pages)."""

    layout: MatrixLayout
    data: U8


@dataclass(frozen=True)
class AttentionWeights:
    """qkv is [(heads + 2 * kv_heads) * D, H]: queries, keys, values one below the other; o is [H, heads * D]."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv: Matrix
    o: Matrix
    scale: float  # of the scores, 1 / sqrt(head_dim) for all known families
    window: int = 0  # sliding window in tokens, 0 = all positions; W: a query sees itself and the W - 1 before it
    qkv_bias: F32 | None = None  # [(heads + 2 * kv_heads) * D]
    o_bias: F32 | None = None  # [H]
    q_norm: F32 | None = None  # per head: [D]; flat: [heads * D]
    k_norm: F32 | None = None  # per head: [D]; flat: [kv_heads * D]
    clip: float | None = None  # clamp q, k, v to +-clip after the norms, before RoPE


@dataclass(frozen=True)
class FFN:
    """A resident SwiGLU network: down(silu(gate x) * up x)."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer without its routed experts. Exactly one of `gate` (a sparse layer) and `dense` is set."""

    input_norm: F32  # [H]
    post_norm: F32  # [H]
    attention: AttentionWeights
    gate: F32 | None = None  # router [E, H]
    dense: FFN | None = None
    shared: FFN | None = None  # shared expert, added for every row
    shared_gate: F32 | None = None  # [H]: the shared expert is weighted by sigmoid(shared_gate . x); None: weight 1


@dataclass(frozen=True)
class ModelWeights:
    """All that is resident, plus the layout that every routed expert has in its run of pages."""

    hidden: int
    vocab: int
    norm_eps: float
    top_k: int
    normalise_top_k: bool  # divide the chosen probabilities by their sum
    experts: int
    layers: tuple[LayerWeights, ...]
    expert: tuple[MatrixLayout, MatrixLayout, MatrixLayout]  # gate, up, down
    final_norm: F32  # [H]
    head: Matrix  # [V, H]
    embedding: NDArray[np.float16] | F32 | None  # [V, H] row-major; None: rows are read from `head` (tied)
    cos: F32  # [P, D / 2], rotary tables with scaling and attention factor applied
    sin: F32  # [P, D / 2]
    routing: Routing | None = None  # None: softmax, counted for nobody


@dataclass
class KVPool:
    """Keys and values of all layers and sequences, one token per index.

    Index slot * slot_size + i is token i of a slot; the last `rows` indices are the staging area: row r of a step is
    written to `staging + r` by attn_router (in the pool's dtype) and moved to `Rows.kv_dst[r]` by expert_ffn, since a
    token's slot belongs to the expert that ranks first for it, known only after the router.
    where[s, l, p] is the pool index of position p of seat s in layer l; kernels read past tokens through it, in order
    of position, so that slot size and history never change a sum. attn_router sets it to the staging index, expert_ffn
    to the final one. first[s, l, p] is the expert that ranked first for the position, set by expert_ffn too; -1 in a
    dense layer, and until expert_ffn ran.

    recent 0: exact attention. Else expert-local in sparse layers: of the positions in its window a query sees the
    first `sinks`, the last `recent` (its own among them), and between them those whose first expert is among the k that
    the gate picks from the hidden state before attention, normed like the gate's usual input. So what a query
    sees depends on its sequence alone, not on slots, and not on the chunks of a prompt while none exceeds `recent`.
    """

    k: NDArray[np.float16] | F32  # [tokens + rows, KVH, D]
    v: NDArray[np.float16] | F32
    where: I32  # [S, L, P]
    first: NDArray[np.int16]  # [S, L, P]
    staging: int
    seen: NDArray[np.int64]  # [L, len(SEEN)] counted by attn_router
    recent: int = 0
    sinks: int = 0


@dataclass
class ExpertPages:
    """The frame arena and the page table: table[l, e, g] is a frame index, ABSENT or COMING.

    Readers replace COMING by the frame while expert_ffn runs, or by ABSENT when a page will not come.
    """

    frames: U8  # [F, PAGE], 64-byte aligned
    table: I32  # [L, E, G]
    waited: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))  # [1] ns that expert_ffn waited
    reader: int | None = None  # address of the C reader that kernels ask for what is coming; None: others bring it


@dataclass
class Rows:
    """The workspace of one step, allocated once for `capacity` rows; kernels read and write it in place."""

    capacity: int
    token: I32  # [R]
    position: I32  # [R]
    seat: I32  # [R] which sequence's `where` row
    x: F32  # [R, H] residual stream
    ffn_in: F32  # [R, H] normed input of router and experts
    router_logits: F32  # [R, E]
    experts: I32  # [R, k] chosen, best first, ties to the lower index
    weights: F32  # [R, k] gate weights in the same order
    kv_dst: I32  # [R] final pool index of each row's K/V in the current layer
    out_row: I32  # [R] rows whose logits are wanted
    logits: F32  # [R, V] for out_row, in that order
    argmax: I32  # [R] of logits, ties to the lower index
    logsumexp: F32  # [R] natural log of the sum of exp(logits)
    spent: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))  # [2] ns so far, see SPENT

    @classmethod
    def allocate(cls, capacity: int, hidden: int, experts: int, top_k: int, vocab: int) -> Rows:
        """Zeroed arrays for at most `capacity` rows of a step."""

        def f(*shape: int) -> F32:
            return np.zeros(shape, np.float32)

        def i(*shape: int) -> I32:
            return np.zeros(shape, np.int32)

        r, e, k = capacity, max(experts, 1), max(top_k, 1)
        return cls(
            r,
            i(r),
            i(r),
            i(r),
            f(r, hidden),
            f(r, hidden),
            f(r, e),
            i(r, k),
            f(r, k),
            i(r),
            i(r),
            f(r, vocab),
            i(r),
            f(r),
        )


class NonFiniteLogits(ValueError):
    """The router of a layer gave NaN for a row; the engine adds the token's text."""

    def __init__(self, layer: int, row: int) -> None:
        super().__init__(f"router logits of layer {layer} are not finite for row {row}")
        self.layer, self.row = layer, row


class MissingPage(RuntimeError):
    """A kernel was asked for an expert whose pages are not in the frame arena: a bug in the caller, never a crash."""


class Backend(Protocol):
    """Numerics of one device. Bound once to its arrays; afterwards calls carry integers only.

    Every result of a row depends on that row alone: not on n, on other rows, on waves, on threads.
    """

    name: str  # cpu, reference, ...
    isa: str  # amx, avx512, avx2, dotprod, neon, plain, numpy
    precision: str  # fast (int8 activations for int8 and int4 weights) or exact (fp32 activations)

    def bind(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        """Check shapes, dtypes and contiguity of everything, keep the addresses. ValueError names what is wrong."""

    def embed(self, n: int) -> None:
        """rows.x[:n] = embedding of rows.token[:n]."""

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        """Norm, QKV, RoPE, K/V to staging, attention, output projection, residual, norm, router logits and top-k.

        Of rows at <= r < at + n. In a dense layer the router part is left out. Raises NonFiniteLogits.
        """

    def expert_ffn(self, layer: int, n: int, first: int, last: int, at: int = 0) -> None:
        """Add experts first <= e < last of rows.experts[:n] to the layer's sum, a row's experts in ascending index.

        The call with first == 0 starts the sum and moves K/V from staging; the call with last == E (dense layers: 0, 0)
        adds the shared expert and then the sum to rows.x. A layer may thus run in waves of experts, of rows
        at <= r < at + n. Pages that are COMING are waited for, and what is there is computed meanwhile. Raises
        MissingPage.
        """

    def head(self, n: int) -> None:
        """Final norm and logits of rows.out_row[:n]; fills rows.logits, rows.argmax, rows.logsumexp."""

    def close(self) -> None:
        """Stop threads, free scratch; idempotent."""


@runtime_checkable
class Staged(Protocol):
    """A backend that can do attn_router in two calls with the same bits, in sparse layers and for the router two_stage.

    Between the two, reads of experts may begin, and no other call is made.
    """

    def first_stage(self, layer: int, n: int, at: int = 0) -> None:
        """All up to the integer scores. rows.experts then has the k experts of each row with the largest of the least
        possible logits, best first, or -1s in a row without a bound: most, if not all, will be chosen. IndexError
        elsewhere."""

    def second_stage(self, layer: int, n: int, at: int = 0) -> None:
        """The choice, from the first stage's scores. IndexError without one of the same rows. NonFiniteLogits."""


@dataclass
class Binding:
    """What `bind` keeps: handy for implementations."""

    weights: ModelWeights
    kv: KVPool
    pages: ExpertPages
    rows: Rows
    keep: list[object] = field(default_factory=list)
