"""One long sequence of an engine, made without computing all of it: real tokens at first, then the same again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench.harness import Block, measured
from colibri_lab.bench.hidden import Listener
from colibri_lab.engine.engine import Engine
from colibri_lab.engine.sequence import Request, Work
from colibri_lab.ops.reference import rotate
from colibri_lab.ops.types import F32, Binding, ModelWeights

CHUNK = 64  # rows of a step


def unlock_routing(engine: Engine, ids: Sequence[int], passes: int = 2) -> None:
    """Take out of each gate the direction that all its inputs share.

    Random weights send every token the same way: their inputs differ less than they agree, so that a few experts get
    them all. Without the shared direction the gates route by what differs.
    """
    parts, weights = engine._parts, weights_of(engine)
    transformer, sums = parts.transformer, np.zeros((len(weights.layers), weights.hidden))

    def add(layer: int, x: F32) -> None:
        sums[layer] += x.sum(axis=0)

    for _ in range(passes):
        sums[:] = 0
        history, backend = History(engine, ids), transformer.backend
        transformer.backend = Listener(backend, parts.rows, add)
        try:
            history.read(len(ids))
        finally:
            transformer.backend = backend
            history.close()
        for layer, total in zip(weights.layers, sums, strict=True):
            assert layer.gate is not None, "shapes have no dense layers"
            shared = (total / np.linalg.norm(total)).astype(np.float32)
            layer.gate[:] -= np.outer(layer.gate @ shared, shared)


def weights_of(engine: Engine) -> ModelWeights:
    """The resident weights that the engine's backend is bound to."""
    bound: Binding = engine._parts.backend._bound  # type: ignore[attr-defined]
    return bound.weights


class History:
    """A seat of the engine with the keys and values of some ids; nobody else may run meanwhile."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self._engine, self._parts, self._stepper = engine, engine._parts, engine._stepper
        self.kv, self.length = engine._parts.kv, 0
        self._request = Request(0, list(ids), len(ids), 0, None, None, None, ())  # type: ignore[arg-type]
        self.seat = self._request.seat = self.kv.open(0)

    def close(self) -> None:
        self.kv.close(self.seat)

    def read(self, count: int, chunk: int = CHUNK) -> None:
        """Compute the next `count` ids in chunks."""
        for start in range(self.length, self.length + count, chunk):
            work = Work(self._request, start, min(chunk, self.length + count - start), False)
            self._stepper.begin([work])
            self._parts.transformer.forward(*self._stepper.fill([work]))
        self.length += count

    def repeat(self, length: int) -> None:
        """Go on to `length` positions with the keys, values and first experts of those there are, again and again.

        Slots are taken as for any token; a key is turned on to its new position.
        """
        pool, rows, weights = self.kv.pool, self._parts.rows, weights_of(self._engine)
        real = self.length
        layers = range(self.kv.layers)
        for start in range(real, length, CHUNK):
            old = np.arange(start, min(start + CHUNK, length)) % real
            new = slice(start, start + len(old))
            turn = start - int(old[0])  # whole chunks are real, so all of these turn alike
            self._request.ids[start:] = [self._request.ids[i] for i in old]
            self.kv.begin([self.seat] * len(old))
            for layer in layers:
                first = pool.first[self.seat, layer, old]
                self.kv.place(layer, first.tolist())
                source, target = pool.where[self.seat, layer, old], rows.kv_dst[: len(old)]
                pool.k[target] = rotate(pool.k[source].astype(np.float32), weights.cos[turn], weights.sin[turn])
                pool.v[target] = pool.v[source]
                pool.where[self.seat, layer, new], pool.first[self.seat, layer, new] = target, first
        self.length = length

    def attend(self, recent: int, sinks: int) -> None:
        """From now on the engine attends like this; recent 0 is exact."""
        p = self._parts
        pool = replace(self.kv.pool, recent=recent, sinks=sinks)
        p.backend.bind(weights_of(self._engine), pool, p.pager.arrays, p.rows)

    def decode(self, ids: Sequence[int]) -> tuple[Block, NDArray[np.float32], int]:
        """Read ids one by one and forget them again: (time, logits [T, V], ns in attn_router, its router apart)."""
        begin, logits, attention = self.length, [], 0
        self._request.ids[begin:] = ids
        with measured(len(ids)) as block:
            for _ in ids:
                self.read(1)
                self._parts.transformer.head([0])
                logits.append(self._parts.rows.logits[0].copy())
                attention += self._parts.transformer.attention_ns
        self.length = begin
        self.kv.rewind(self.seat, begin)
        return block, np.array(logits), attention

    def seen(self) -> NDArray[np.int64]:
        """int64 [4]: what attention counted so far, over all layers; see ops.types.SEEN."""
        total: NDArray[np.int64] = self.kv.pool.seen.sum(axis=0)
        return total

    def first_experts(self) -> F32:
        """float32 [L, E]: the share of each expert among the first ones."""
        first = self.kv.pool.first[self.seat, :, : self.length]
        experts = self._engine.describe()["experts"]
        return np.array([np.bincount(row, minlength=experts) / self.length for row in first], np.float32)
