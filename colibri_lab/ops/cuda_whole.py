"""A decode step that the host neither leads nor watches: all layers and the head at one go, captured as a graph.

What changes from step to step is written to the device before, in one piece; what the host wants to know is read after,
in one piece. Between them no number leaves the device: experts are found through the page table by the ids that the
router left there, so all of them must be on it. Keys and values stay in a staging of their own for each layer until
the host has given them a place (`settle`).

A batch is filled up to the next size with rows of a seat that nobody has. Shape legend as in types.py; B: rows of a
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .cuda_attention import SPLIT, Attention, Lines, starts
from .cuda_experts import Experts
from .cuda_router import Choice, RouterLaunches
from .graphs import Graphs
from .launch import Kernels
from .layout import ceil_div
from .products import Activations, Jobs, Residents
from .routing import COUNTS
from .types import F32, I32, KVPool, ModelWeights, NonFiniteLogits, Rows

SIZES = (1, 2, 4, 8, 16, 32)  # rows of a graph
SHARED = 48 << 10  # bytes that a block has without asking
NOT_FINITE = 1  # status of a row, as in common.cuh

Embed = Callable[[Any, int], None]
Head = Callable[[Any, int, Jobs, "Scores"], None]  # rows [n], n, jobs of n inputs, and where it writes


class Scores(NamedTuple):
    """Of n rows of logits: argmax int32, that logit, and the log of the sum of exponentials, float32."""

    argmax: Any
    largest: Any
    logsumexp: Any


class Given:
    """What a step of B rows is told, in one buffer: on the host as arrays, on the device as views of equal places."""

    def __init__(self, host: I32, device: Any, layers: int, rows: int) -> None:
        """host, device: int32, as long as `words` says."""
        self._host, self._device, at = host, device, 0
        both = (host, device)

        def cut(*shape: int, wide: bool = False) -> list[Any]:
            nonlocal at
            size = int(np.prod(shape)) * (2 if wide else 1)
            parts = [a[at : at + size].view(np.int64) if wide else a[at : at + size] for a in both]
            at += size
            return [part.reshape(shape) for part in parts]

        (self.begin, self.begins), (self.count, self.counts) = cut(layers, rows, wide=True), cut(layers, rows)
        (self.token, self.tokens), (self.seat, self.seats) = cut(rows), cut(rows)
        (self.position, self.positions), (self.live, self.lives) = cut(rows), cut(1)
        self.words = at

    def write(self, device: Any) -> None:
        device.write(self._device[: self.words], self._host[: self.words])

    @staticmethod
    def most(layers: int, rows: int) -> int:
        """Words of int32."""
        return ceil_div(3 * layers * rows + 3 * rows + 1, 2) * 2  # begin is int64


class Found:
    """What a step of B rows leaves: views of one buffer on the device, and of a copy on the host after `read`."""

    def __init__(self, buffer: Any, layers: int, rows: int, k: int) -> None:
        """buffer: int32, as long as `most` says."""
        at = 0

        def cut(dtype: Any, *shape: int) -> Any:
            nonlocal at
            size = int(np.prod(shape))
            at += size
            return buffer[at - size : at].view(dtype).reshape(shape)

        self.status, self.experts = cut(np.int32, layers, rows), cut(np.int32, layers, rows, k)
        self.weights = cut(np.float32, layers, rows, k)
        self.counts, self.span = cut(np.int32, layers, rows, len(COUNTS)), cut(np.float32, layers, rows, 2)
        self.argmax, self.largest, self.logsumexp = cut(np.int32, rows), cut(np.float32, rows), cut(np.float32, rows)
        self.buffer = buffer[:at]

    def choice(self, layer: int) -> Choice:
        """Where a layer's router writes."""
        return Choice(
            self.experts[layer], self.weights[layer], self.counts[layer], self.span[layer], self.status[layer]
        )

    @staticmethod
    def most(layers: int, rows: int, k: int) -> int:
        """Words of int32."""
        return layers * rows * (1 + 2 * k + len(COUNTS) + 2) + 3 * rows


class Whole:
    """Room for steps of up to `most` rows; 0 where there is none."""

    def __init__(self, kernels: Kernels, weights: ModelWeights, kv: KVPool, rows: Rows, sizes: tuple[int, ...]) -> None:
        """sizes: as sizes_for says. `bind` brings the rest."""
        self._kernels, self._device, self._w, self._kv, self._rows = kernels, kernels.device, weights, kv, rows
        self.sizes, self.most = sizes, max(sizes, default=0)
        self.graphs = Graphs(self._device)
        self.ended: tuple[int, Found] | None = None  # rows of the last step, and what it left, on the host
        layers, k, d = len(weights.layers), max(weights.top_k, 1), self._device
        if not sizes:
            return
        given, found = Given.most(layers, self.most), Found.most(layers, self.most, k)
        host, there, left = np.zeros(given, np.int32), d.empty((given,), np.int32), d.empty((found,), np.int32)
        self._given = {b: Given(host, there, layers, b) for b in sizes}
        self._found = {b: Found(left, layers, b, k) for b in sizes}
        self._targets, self._firsts = (d.empty((layers * self.most,), np.int32) for _ in range(2))
        self.target: I32 = np.zeros((layers, self.most), np.int32)  # [L, B] final place of each row's K/V in the pool
        self._seat, self._position = (d.empty((self.most,), np.int32) for _ in range(2))

    def bind(self, attention: Attention, router: RouterLaunches, experts: Experts, acts: Activations,
             residents: Residents, x: Any, ffn_in: Any, embed: Embed, head: Head) -> None:  # fmt: skip
        """What the launches need; embed(tokens, n) fills x."""
        self._attention, self._router, self._experts, self._acts = attention, router, experts, acts
        self._residents, self._x, self._ffn_in, self._embed, self._head = residents, x, ffn_in, embed, head

    @staticmethod
    def sizes_for(w: ModelWeights, kv: KVPool, capacity: int) -> tuple[int, ...]:
        """Sizes of batches that graphs are for: as many rows as there are seats, filled up to the next size."""
        seats, _, positions = kv.where.shape
        most = min(capacity, positions, SHARED // (8 * max(w.top_k, 1)))
        return tuple(b for b in SIZES if b <= most and b < 2 * seats)

    def run(self, n: int) -> None:
        """rows.token, .seat, .position [n] through all layers and the head. NonFiniteLogits; IndexError for a table
        that is wrong. Its keys and values have no place in the pool yet: `settle`."""
        b = next(size for size in self.sizes if size >= n)
        given, found = self._given[b], self._found[b]
        splits = self._tell(given, n, b)
        given.write(self._device)
        self.graphs.run((b, splits), self._stamp(), lambda: self._launch(given, found, b, splits))
        host = Found(self._device.read(found.buffer), len(self._w.layers), b, max(self._w.top_k, 1))
        self._raise(host.status[:, :n])
        self._count(host, given, n)
        self.ended = n, host

    def settle(self) -> None:
        """K/V of the last step's rows to `target` [L, n], in all layers at once; the tables on both sides."""
        assert self.ended is not None
        (n, host), layers, kv, rows = self.ended, len(self._w.layers), self._kv, self._rows
        first = np.full((layers, n), -1, np.int32)
        sparse = [i for i, layer in enumerate(self._w.layers) if layer.gate is not None]
        first[sparse] = host.experts[sparse, :n, 0]
        target = np.ascontiguousarray(self.target[:, :n])
        d, size = self._device, layers * n
        for room, values in ((self._targets[:size], target.reshape(-1)), (self._firsts[:size], first.reshape(-1)),
                             (self._seat[:n], rows.seat[:n]), (self._position[:n], rows.position[:n])):  # fmt: skip
            d.write(room, values)
        self._attention.settle(self._targets[:size], self._seat[:n], self._position[:n], self._firsts[:size], n,
                               self.staging(0), 0, layers, self.most)  # fmt: skip
        at = rows.seat[:n], np.arange(layers)[:, None], rows.position[:n]
        kv.where[at], kv.first[at] = target, first

    def staging(self, layer: int) -> int:
        """Index in the pool of a layer's own staging."""
        return len(self._kv.k) + layer * self.most

    def _tell(self, given: Given, n: int, b: int) -> int:
        """Fill in what the step is told; blocks that share a row's tokens, a power of two or all there can be."""
        rows, kv, w, a = self._rows, self._kv, self._w, self._attention
        seats, _, positions = kv.where.shape
        given.token[:n], given.seat[:n], given.position[:n] = rows.token[:n], rows.seat[:n], rows.position[:n]
        given.token[n:], given.seat[n:], given.position[n:] = 0, seats, np.arange(n, b)
        given.live[0] = n
        past = given.position + 1
        longest = 1
        for layer, block in enumerate(w.layers):
            begin = starts(block, past)
            begin[n:] = past[n:] - 1  # who only fills up sees itself
            given.begin[layer] = a.begins(layer, given.seat, begin)
            given.count[layer] = past - begin
            longest = max(longest, int(given.count[layer].max()))
        splits = ceil_div(longest, SPLIT)
        return min(1 << (splits - 1).bit_length(), ceil_div(positions, SPLIT))

    def _launch(self, given: Given, found: Found, b: int, splits: int) -> None:
        """All launches of a step; arguments are places and what `_stamp` and the graph's key name."""
        status, x, ffn_in = found.status.reshape(-1).view(np.float32), self._x[:b], self._ffn_in[:b]
        jobs, every = self._residents.jobs(b), slice(0, b)
        self._kernels("clear", (ceil_div(status.size, 256), 1, 1), 256, status, status.size)
        self._embed(given.tokens, b)
        for layer, block in enumerate(self._w.layers):
            lines = Lines(b, 0, self.staging(layer), jobs, given.seats, given.positions, found.status[layer],
                          self._attention.where, given.begins[layer], given.counts[layer], splits)  # fmt: skip
            self._attention.project(layer, self._x, lines, self._acts)
            self._attention.attend(layer, x, ffn_in, lines, self._acts)
            if block.gate is not None:
                choice = found.choice(layer)
                self._router.choose(layer, ffn_in, b, choice)
                self._experts.run_chosen(layer, ffn_in, choice, b, given.lives)
            else:
                self._experts.clear(b)
            self._experts.finish(layer, ffn_in, x, every)
        self._head(self._residents.rows[:b], b, jobs, Scores(found.argmax, found.largest, found.logsumexp))

    def _stamp(self) -> tuple[Any, ...]:
        """What launches hold that is neither in the buffers nor in the key: settings, and where arrays begin that may
        be others one day."""
        frames, routing, address = self._experts.frames, self._router.routing, self._device.driver.address
        assert frames is not None
        places = (frames.frames, frames.table, self._attention.where, self._attention.k, self._x)
        return (routing.kind, routing.bits, routing.audit, self._w.top_k, *map(address, places))

    def _raise(self, status: I32) -> None:
        """status [L, n]."""
        for layer, r in np.argwhere(status)[:1]:
            if status[layer, r] == NOT_FINITE:
                raise NonFiniteLogits(int(layer), int(r))
            raise IndexError(f"where is outside its range (at {r})")

    def _count(self, found: Found, given: Given, n: int) -> None:
        """What attention read, and the routers' counters."""
        seen = given.count[:, :n].sum(axis=1)
        self._kv.seen[:, :2] += seen[:, None]
        for layer, block in enumerate(self._w.layers):
            if block.gate is not None:
                self._router.add(layer, found.counts[layer, :n], found.span[layer, :n])

    def chosen(self, layer: int) -> tuple[I32, F32]:
        """(experts, weights) [n, k] of a layer in the last step."""
        assert self.ended is not None
        n, found = self.ended
        return found.experts[layer, :n], found.weights[layer, :n]
