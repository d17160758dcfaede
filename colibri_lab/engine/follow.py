"""One token's way through the model, as copies of the engine's own arrays at each station. For notebooks and doubters.

Shapes: H hidden, E experts, k experts a token, T positions up to the token, N rows of its step, G pages of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.transformer import Transformer
from ..ops.types import F32, I32, KVPool, Staged
from ..pager.pager import Pager
from .evaluate import Drop, Turn, forward
from .step import Stepper

Array = Callable[[], Any]  # what a field holds until the token reaches its station
EMPTY: Array = partial(np.zeros, 0, np.float32)
NOBODY: Array = partial(np.zeros, (0, 0), np.int32)


@dataclass
class Visit:
    """What one layer did with the token; `row` is its row in the step's arrays. A dense layer chooses no expert."""

    row: int
    entered: F32  # [H] the residual stream before the layer
    attended: F32 = field(default_factory=EMPTY)  # [H] after attention
    ffn_in: F32 = field(default_factory=EMPTY)  # [H] the normed input of router and experts
    router_logits: F32 = field(default_factory=EMPTY)  # [E]
    experts: I32 = field(default_factory=NOBODY)  # [N, k] of all rows, best first
    weights: F32 = field(default_factory=NOBODY)  # [N, k]
    waves: list[tuple[int, int]] = field(default_factory=list)  # (first, last) of each call of the experts' kernel
    frames: dict[int, I32] = field(default_factory=dict)  # the token's expert -> [G] frames that the kernel read
    places: I32 = field(default_factory=EMPTY)  # [T] in the KV pool: slot * slot size + token
    keys: NDArray[Any] = field(default_factory=EMPTY)  # [T, KVH, D] rotated, in the pool's dtype
    values: NDArray[Any] = field(default_factory=EMPTY)  # [T, KVH, D]
    left: F32 = field(default_factory=EMPTY)  # [H] the residual stream after the layer

    @property
    def chosen(self) -> I32:
        """[k] the token's own experts, best first."""
        own: I32 = self.experts[self.row if len(self.experts) else slice(0)].reshape(-1)
        return own

    @property
    def shares(self) -> F32:
        """[k] the weights of its own experts."""
        own: F32 = self.weights[self.row if len(self.weights) else slice(0)].reshape(-1)
        return own


@dataclass(repr=False)
class Followed:
    """The last of some ids on its way. `layers` holds a Visit each; logits [vocabulary] tell what comes next."""

    ids: list[int]
    layers: list[Visit] = field(default_factory=list)
    logits: F32 = field(default_factory=EMPTY)

    @property
    def embedded(self) -> F32:
        """[H] the token's row of the embedding."""
        return self.layers[0].entered

    def __repr__(self) -> str:
        return f"<token {self.ids[-1]} at position {len(self.ids) - 1}, followed through {len(self.layers)} layers>"


class Follower:
    """Stands in for a backend: passes calls on, and copies what the last position had before and after each."""

    def __init__(self, transformer: Transformer, kv: KVPool, pager: Pager, path: Followed) -> None:
        self._transformer, self._kv, self._pager, self._path = transformer, kv, pager, path
        self._backend, self._last = transformer.backend, len(path.ids) - 1

    def __enter__(self) -> None:
        self._transformer.backend = self

    def __exit__(self, *_: object) -> None:
        self._transformer.backend = self._backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        self._attends(self._backend.attn_router, layer, n, at)

    def first_stage(self, layer: int, n: int, at: int = 0) -> None:
        """Of two calls in place of attn_router the one that attends."""
        assert isinstance(self._backend, Staged)
        self._attends(self._backend.first_stage, layer, n, at)

    def _attends(self, call: Callable[[int, int, int], None], layer: int, n: int, at: int) -> None:
        rows, row = self._transformer.rows, self._row(n, at)
        visit = None if row is None else Visit(row - at, rows.x[row].copy())
        call(layer, n, at)
        if visit is not None:
            visit.attended, visit.ffn_in = rows.x[row].copy(), rows.ffn_in[row].copy()
            self._path.layers.append(visit)

    def expert_ffn(self, layer: int, n: int, first: int, last: int, at: int = 0) -> None:
        self._backend.expert_ffn(layer, n, first, last, at)
        row = self._row(n, at)
        if row is None:
            return
        rows, kv, visit = self._transformer.rows, self._kv, self._path.layers[layer]
        visit.left = rows.x[row].copy()
        if first == 0:
            visit.places = kv.where[rows.seat[row], layer, : self._last + 1].copy()
            visit.keys, visit.values = kv.k[visit.places], kv.v[visit.places]
        if last == 0:  # a dense layer
            return
        visit.router_logits = rows.router_logits[row].copy()
        visit.waves.append((first, last))
        visit.experts, visit.weights = rows.experts[at : at + n].copy(), rows.weights[at : at + n].copy()
        for expert in visit.chosen.tolist():
            if first <= expert < last:
                visit.frames[expert] = self._pager.arrays.table[layer, expert, : self._pager.frames.pages].copy()

    def head(self, n: int) -> None:
        self._backend.head(n)
        rows = self._transformer.rows
        for i, row in enumerate(rows.out_row[:n].tolist()):
            if rows.position[row] == self._last:
                self._path.logits = rows.logits[i].copy()

    def _row(self, n: int, at: int) -> int | None:
        """The step's row of the last position, if it is among these."""
        found: Sequence[int] = np.flatnonzero(self._transformer.rows.position[at : at + n] == self._last).tolist()
        return at + found[0] if found else None


def follow(stepper: Stepper, turn: Turn, drop: Drop, ids: Sequence[int]) -> Followed:
    """Run ids as `Engine.logits` does, and keep what the last of them met."""
    path = Followed(list(ids))
    follower = Follower(stepper.transformer, stepper.kv.pool, stepper.pager, path)
    forward(stepper, turn, drop, ids, lambda *_: None, follower)
    return path
