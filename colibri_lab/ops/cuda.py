"""The GPU backend's launches. What it runs on is a device.Device: a card's, or the simulator's (backend: sim).

Weights, keys and values, expert frames and the residual stream live on the device; of a step's results the host reads
what the engine looks at. Sums depend on a row alone (kernels/README.md), so batches and waves change no bit.
"""

from __future__ import annotations

from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from . import checks
from .cuda_attention import SPLIT, WARPS, Attention, Lines, starts
from .cuda_experts import Experts, Sharing
from .cuda_router import RouterLaunches
from .cuda_sample import MOST_VOCAB, Chooser, Chosen, Draw
from .cuda_whole import NOT_FINITE, Scores, Whole
from .device import Device
from .frames import DeviceFrames
from .launch import LANE_DIMS, Kernels
from .layout import ceil_div
from .products import Activations, Jobs, Residents, Vectors, upload
from .types import Binding, ExpertPages, KVPool, LayerWeights, ModelWeights, NonFiniteLogits, Rows

TOGETHER = 16  # tokens that a launch chooses: each takes 16 bytes of memory for each word of the vocabulary


class CudaBackend:
    """See types.Backend. `kernels.launches` counts launches, `experts.frames` the transfers of pages; `whole` does a
    decode step at one go, where `graphless` has nothing to say."""

    isa = "cuda"

    def __init__(self, device: Device, precision: str = "fast", sharing: Sharing | None = None,
                 graphs: bool = True) -> None:  # fmt: skip
        """sharing: of experts between device and processor; None: all are on the device as far as it has room. graphs:
        whether decode steps may be captured."""
        self._sharing, self._graphs = sharing or Sharing(), graphs
        self.precision = checks.precision(precision)
        self.device, self.name = device, device.name
        self.kernels = Kernels(device)
        self._bound: Binding | None = None

    def bind(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        checks.bind(weights, kv, pages, rows)
        if kv.k.shape[2] > 32 * LANE_DIMS[-1]:
            raise ValueError(f"head_dim {kv.k.shape[2]} is more than the {32 * LANE_DIMS[-1]} of attention's kernels")
        if self._bound is not None:
            self._bound = None
            self.device.release()
        try:
            self._take(weights, kv, pages, rows)
        except BaseException:  # not enough memory, or Ctrl-C: nothing of it stays on the device
            self.device.release()
            raise
        self._bound = Binding(weights, kv, pages, rows)

    def _take(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        """All memory of the device that will ever be needed, and what is resident there."""
        w, r, d = weights, rows.capacity, self.device
        self._w = w
        self._residents, self._vectors = Residents(d, r), Vectors(d, w)
        self.whole = Whole(self.kernels, w, kv, rows, Whole.sizes_for(w, kv, r) if self._graphs else ())
        for size in self.whole.sizes:
            self._residents.keep(size)
        spare = len(w.layers) * self.whole.most
        self.attention = Attention(self.kernels, w, kv, r, spare, self._residents, self._vectors)
        self._head = self._residents.matrix(w.head)
        self._table = None if w.embedding is None else upload(d, w.embedding)
        self._x, self._ffn_in, self._normed = (d.empty((r, w.hidden), np.float32) for _ in range(3))
        self._logits = d.empty((r, w.vocab), np.float32)
        self._scores = Scores(d.empty((r,), np.int32), *(d.empty((r,), np.float32) for _ in range(2)))
        self.largest = np.zeros(r, np.float32)  # the logit of rows.argmax, after `score`
        seats = len(kv.where)
        self.chooser = None if w.vocab > MOST_VOCAB else Chooser(self.kernels, w.vocab, min(seats, TOGETHER), seats)
        self._sight = d.empty((r * kv.where.shape[2],), np.int32) if kv.recent else None
        self._ints = {name: d.empty((r,), np.int32) for name in ("token", "seat", "position", "count", "status", "out")}
        self._begin = d.empty((r,), np.int64)
        self.router = RouterLaunches(self.kernels, w, r)
        products = [*self.attention.products(r), (r, self._head)]
        self._acts = Activations(self.kernels, self.precision == "fast", products)
        self.experts = Experts(self.kernels, w, pages, r, self._residents, self.precision, self._sharing)
        self.whole.bind(self.attention, self.router, self.experts, self._acts, self._residents, self._x, self._ffn_in,
                        self._embedded, self._scored)  # fmt: skip

    @property
    def tier(self) -> DeviceFrames | None:
        """Experts on the device; None where none comes there."""
        return self.experts.frames

    def graphless(self) -> str:
        """Why no decode step of this binding can be a graph; empty where it can, once all experts are on the device."""
        kv, tier = self._all().kv, self.tier
        if not self._graphs:
            return "they are off"
        if not self.whole.sizes:
            return "a context this short, or with so many experts a token, is not captured"
        if kv.recent:
            return "attention: expert_local is not captured"
        if self.experts.host is not None or tier is None:
            return "expert_placement leaves experts to the processor"
        if tier.tier.capacity < tier.most:
            return f"gpu_cache_bytes has room for {tier.tier.capacity} of the {tier.most} experts"
        return ""

    def counters(self) -> dict[str, int]:
        """Of experts on the device, of memory and transfers, and of graphs."""
        return {**self.device.counters(), **self.experts.counters(), **self.whole.graphs.counters()}

    def _all(self) -> Binding:
        if self._bound is None:
            raise RuntimeError("the backend is not bound")
        return self._bound

    def embed(self, n: int) -> None:
        b = self._all()
        token = self._int("token", checks.indices(b.rows.token[:n], b.weights.vocab, "token"))
        self._begins()
        self._embedded(token, n)

    def run_whole(self, n: int) -> None:
        """A step of n rows of as many seats at one go: `embed`, all layers, `head` of all rows in order. Where
        `graphless` is empty and all experts are on the device. `whole` has what it found, and gives keys and values
        their place. IndexError, NonFiniteLogits."""
        b = self._all()
        checks.indices(b.rows.token[:n], b.weights.vocab, "token")
        checks.positions(b.rows, b.kv, b.weights, 0, n)
        self._begins()
        self.whole.run(n)
        self.experts.picks_gpu += n * b.weights.top_k * sum(layer.gate is not None for layer in b.weights.layers)

    def _begins(self) -> None:
        self.whole.ended = None
        if self.experts.frames is not None:
            self.experts.frames.next_step()

    def _embedded(self, token: Any, n: int) -> None:
        w, head = self._w, self._head
        grid = (ceil_div(w.hidden, 256), n, 1)
        if w.embedding is not None:
            kind = "half_t" if w.embedding.dtype == np.float16 else "float"
            self.kernels(f"embed<{kind}>", grid, 256, self._table, token, self._x, w.hidden)
        else:
            group = head.layout.group if head.layout.quantised else 0
            self.kernels(f"embed_tiles<{head.format}>", grid, 256, head.frames, head.tables, token, self._x, w.hidden,
                         group, *head.place, head.layout.tile_cols)  # fmt: skip

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        b = self._all()
        w, kv, rows, block = b.weights, b.kv, b.rows, b.weights.layers[layer]
        checks.positions(rows, kv, w, at, n)
        if n == 0:
            return
        some = slice(at, at + n)
        lines, guessed = self._lines(block, layer, n, at)
        self.attention.project(layer, self._x, lines, self._acts)
        kv.where[rows.seat[some], layer, rows.position[some]] = kv.staging + np.arange(at, at + n)
        kv.first[rows.seat[some], layer, rows.position[some]] = -1
        if lines.sight is self._sight:
            self._look(block, layer, lines)
        self.attention.attend(layer, self._x[some], self._ffn_in[some], lines, self._acts)
        self._raise(lines.status, layer, at)  # a wrong table, before the router counts anything
        if block.gate is not None:
            begin = clock()  # what came before is done: its status was read
            self.router.choose(layer, self._ffn_in[some], n, self.router.room(lines.status))
            self._raise(lines.status, layer, at)
            self.router.read(layer, rows, some)
            rows.spent[0] += clock() - begin
        for target, source in ((rows.x, self._x), (rows.ffn_in, self._ffn_in)):
            target[some] = self.device.read(source[some])
        self._count(layer, lines, guessed, some)

    def expert_ffn(self, layer: int, n: int, first: int, last: int, at: int = 0) -> None:
        b = self._all()
        if n == 0:
            return
        some = slice(at, at + n)
        begin = clock()
        picks = self.experts.plan(layer, b.rows, some, first, last)
        b.rows.spent[1] += clock() - begin
        if first == 0:
            self._settle(layer, n, at)
        self.experts.run(layer, picks, self._ffn_in[some], b.rows.ffn_in[some], some, start=first == 0)
        if b.weights.layers[layer].dense is not None or last == b.weights.experts:
            self.experts.finish(layer, self._ffn_in[some], self._x[some], some)
            b.rows.x[some] = self.device.read(self._x[some])

    def head(self, n: int) -> None:
        self.score(n)
        self._all().rows.logits[:n] = self.device.read(self._logits[:n])

    def score(self, n: int) -> None:
        """`head`, whose logits stay on the device: `choose` takes tokens from them, `read_logits` brings some."""
        b = self._all()
        rows, ended = b.rows, self.whole.ended
        out = checks.indices(rows.out_row[:n], rows.capacity, "out_row")
        if n == 0:
            return
        if ended is not None and np.array_equal(out, np.arange(ended[0])):  # a whole step has scored its rows
            found: Any = ended[1]
        else:
            there = Scores(*(a[:n] for a in self._scores))
            self._scored(self._int("out", out), n, self._residents.jobs(n), there)
            found = Scores(*(self.device.read(a) for a in there))
        rows.argmax[:n], rows.logsumexp[:n], self.largest[:n] = found.argmax[:n], found.logsumexp[:n], found.largest[:n]

    def choose(self, seats: list[int], draws: list[Draw]) -> Chosen:
        """A token of each row that was scored last. Where there is a `chooser`."""
        assert self.chooser is not None
        return self.chooser.choose(self._logits[: len(draws)], seats, draws)

    def read_logits(self, row: int) -> None:
        """rows.logits of a row that was scored last."""
        self._all().rows.logits[row] = self.device.read(self._logits[row : row + 1])[0]

    def _scored(self, out: Any, n: int, jobs: Jobs, to: Scores) -> None:
        """Logits of rows `out` [n] of the residual stream, and what is to be known of each."""
        w = self._w
        self.kernels("rms_norm", (n, 1, 1), 256, self._x, out, self._vectors(w.final_norm), self._normed, w.hidden,
                     w.norm_eps, shared=4 * WARPS)  # fmt: skip
        self._acts.multiply(self._normed, self._head, n, jobs, self._logits)
        self.kernels("finish_logits", (n, 1, 1), 256, self._logits, *to, w.vocab, shared=4 * WARPS)

    def close(self) -> None:
        if self._bound is not None:
            self._bound = None
            self.experts.close()
        self.device.close()

    def _lines(self, block: LayerWeights, layer: int, n: int, at: int) -> tuple[Lines, np.ndarray[Any, Any]]:
        """The rows for a layer's attention; which of them [n] have their experts guessed for it."""
        b = self._all()
        kv, rows, some = b.kv, b.rows, slice(at, at + n)
        past: np.ndarray[Any, Any] = rows.position[some] + 1
        begin = starts(block, past)
        self._reach = past - begin
        guessed, sight, count = np.zeros(n, bool), self.attention.where, self._ints["count"][:n]
        if kv.recent and block.gate is not None:
            guessed, sight = np.maximum(begin, kv.sinks) < past - kv.recent, self._sight
            self._upload(self._begin, np.arange(n, dtype=np.int64) * self.attention.positions)
        else:
            self._upload(self._begin, self.attention.begins(layer, rows.seat[some], begin))
            self._int("count", self._reach.astype(np.int32))
        return Lines(n, at, kv.staging + at, self._residents.jobs(n), self._int("seat", rows.seat[some]),
                     self._int("position", rows.position[some]), self._int("status", np.zeros(n, np.int32)), sight,
                     self._begin[:n], count, ceil_div(int(self._reach.max()), SPLIT)), guessed  # fmt: skip

    def _look(self, block: LayerWeights, layer: int, lines: Lines) -> None:
        """Set which tokens each row sees, by the experts that it is guessed to choose."""
        b = self._all()
        kv, w, n = b.kv, b.weights, lines.n
        guess = self.router.guess(layer, self._x, self._residents.rows[lines.at :], self._vectors(block.post_norm), n)
        self.kernels("collect_sight", (n, 1, 1), 32, self.attention.where, self.attention.first, guess, lines.seat,
                     lines.position, lines.sight, lines.count, lines.status, w.top_k, w.experts, layer, len(w.layers),
                     self.attention.positions, block.attention.window, kv.recent, kv.sinks)  # fmt: skip

    def _settle(self, layer: int, n: int, at: int) -> None:
        """K/V of the rows to their slots, on the device; the tables on both sides."""
        b = self._all()
        kv, rows, some = b.kv, b.rows, slice(at, at + n)
        dense = b.weights.layers[layer].dense is not None
        target = checks.indices(rows.kv_dst[some], len(kv.k), "kv_dst")
        expert = np.full(n, -1, np.int32) if dense else rows.experts[some, 0].copy()
        seat, position = self._int("seat", rows.seat[some]), self._int("position", rows.position[some])
        self.attention.settle(self._int("out", target), seat, position, self._int("count", expert), n, kv.staging + at,
                              layer)  # fmt: skip
        kv.where[rows.seat[some], layer, rows.position[some]] = target
        kv.first[rows.seat[some], layer, rows.position[some]] = expert

    def _count(self, layer: int, lines: Lines, guessed: np.ndarray[Any, Any], some: slice) -> None:
        b = self._all()
        seen, recalled = self.device.read(lines.count), 0
        if guessed.any():
            guess = self.router.guesses(len(guessed))
            recalled = int((guess == b.rows.experts[some, :1]).any(axis=1)[guessed].sum())
        b.kv.seen[layer] += (int(seen.sum()), int(self._reach.sum()), int(guessed.sum()), recalled)

    def _raise(self, on_device: Any, layer: int, at: int) -> None:
        status = self.device.read(on_device)
        for r in np.flatnonzero(status)[:1]:
            if status[r] == NOT_FINITE:
                raise NonFiniteLogits(layer, at + int(r))
            raise IndexError(f"where is outside its range (at {r})")

    def _int(self, name: str, values: np.ndarray[Any, Any]) -> Any:
        return self._upload(self._ints[name], values)

    def _upload(self, room: Any, values: np.ndarray[Any, Any]) -> Any:
        target = room[: len(values)]
        self.device.write(target, np.ascontiguousarray(values, room.dtype))
        return target
