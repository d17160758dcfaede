"""One engine in a process of its own, for what its memory tells: takes orders as JSON lines, answers each with one.

python -m colibri_lab.bench.persist_child, then {"op": "load", ...}, and the other methods of `Child` by name.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench import ours
from colibri_lab.bench.shapes import SHAPES
from colibri_lab.engine.engine import Engine
from colibri_lab.engine.sequence import Token

EVERY = 0.01  # seconds between two looks at the process's memory


class Memory:
    """Peaks of this process's resident memory, by kind, from now on."""

    def __init__(self) -> None:
        self.peak = {"RssAnon": 0, "RssFile": 0}
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def now(self) -> None:
        """Look once."""
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)
                 if name in self.peak}  # fmt: skip
        self.peak = {name: max(self.peak[name], value) for name, value in found.items()}

    def _watch(self) -> None:
        while not self.stop.wait(EVERY):
            self.now()


class Drawn:
    """Stands in for `Transformer.forward`: positions get drawn keys, values and first experts, in real slots.

    So a long context is there in seconds; everything around it (batches, tables, slots, persistence) is the engine's.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._parts, self._rng = engine._parts, np.random.default_rng(seed)
        pool, experts = self._parts.kv.pool, engine.describe()["experts"]
        self._drawn = self._rng.standard_normal((4096, *pool.k.shape[1:]), np.float32).astype(pool.k.dtype)
        share = 1 / np.arange(1, experts + 1)  # Zipf, as trained routers have it; another order in each layer
        self._shares = [self._rng.permutation(share / share.sum()) for _ in range(self._parts.kv.layers)]

    def forward(self, n: int, seats: Sequence[int]) -> None:
        kv, rows = self._parts.kv, self._parts.rows
        kv.begin(seats)
        for layer, share in enumerate(self._shares):
            first = self._rng.choice(len(share), n, p=share)
            kv.place(layer, first.tolist())
            to, at = rows.kv_dst[:n], int(self._rng.integers(0, len(self._drawn) - n))
            kv.pool.k[to] = kv.pool.v[to] = self._drawn[at : at + n]
            kv.pool.where[rows.seat[:n], layer, rows.position[:n]] = to
            kv.pool.first[rows.seat[:n], layer, rows.position[:n]] = first


class Child:
    """The orders, one method each; every answer is a dictionary."""

    def __init__(self) -> None:
        self.memory = Memory()

    def load(self, shape: str, positions: int, threads: int, seed: int, experts: float, folder: str | None,
             dtype: str) -> dict[str, Any]:  # fmt: skip
        """experts: the share of all experts that has room in memory."""
        chosen = replace(SHAPES[shape], positions=positions)
        slots = chosen.layers * (positions // 256 + 24)
        path: dict[str, Any] = {} if folder is None else {"kv_cache_persistence_path": folder}
        self.engine = ours.load(chosen, seed, threads, telemetry=False, max_batch_size=1, prefill_chunk=256,
                                kv_cache_max_slots=slots, kv_cache_dtype=dtype, **path)  # fmt: skip
        facts = self.engine.describe()
        budget = max(facts["expert_cache_least_bytes"], int(facts["experts_total_bytes"] * experts))
        self.engine.settings.expert_cache_bytes = budget
        pager = self.engine._parts.pager
        most = budget // facts["expert_bytes"] // chosen.layers
        for layer in range(chosen.layers):  # as a long text would have done: memory is what it will be
            for first in range(0, min(most, chosen.experts), pager.room):
                pager.acquire(layer, range(first, min(first + pager.room, most, chosen.experts)))
        self._real = self.engine._parts.transformer.forward
        return {}

    def begin(self, tokens: int, computed: int, seed: int) -> dict[str, Any]:
        """A prompt of `tokens` ids of which the last `computed` are really computed; seconds to the first token."""
        ids: NDArray[np.int64] = np.random.default_rng(seed).integers(0, self.engine.spec.vocab_size, tokens)
        transformer, drawn = self.engine._parts.transformer, Drawn(self.engine, seed)

        def forward(n: int, seats: Sequence[int]) -> None:
            last = int(self.engine._parts.rows.position[n - 1])
            (drawn.forward if last < tokens - computed else self._real)(n, seats)

        transformer.forward = forward  # type: ignore[method-assign]
        self.stream: Iterator[Token] = self.engine.generate(ids.tolist(), max_tokens=tokens)
        begin = clock()
        next(self.stream)
        return {"seconds": clock() - begin}

    def decode(self, tokens: int) -> dict[str, Any]:
        begin = clock()
        for _ in range(tokens):
            next(self.stream)
        return {"seconds": clock() - begin}

    def look(self) -> dict[str, Any]:
        """Peaks so far, counters, sizes."""
        self.memory.now()
        c = self.engine.counters()
        facts = self.engine.describe()
        sizes = {name: facts[name] for name in ("expert_bytes", "resident_bytes")}
        return {"peak": self.memory.peak, **c, **sizes}

    def settle(self) -> dict[str, Any]:
        """Wait until what was stored is on the disk."""
        if self.engine._parts.persistence is not None:
            self.engine._parts.persistence.settle()
        return {}

    def end(self) -> dict[str, Any]:
        """The request ends (and is stored); seconds until that is done."""
        begin = clock()
        self.stream.close()  # type: ignore[attr-defined]
        return {"seconds": clock() - begin}

    def close(self) -> dict[str, Any]:
        begin = clock()
        self.engine.close()
        self.memory.stop.set()
        return {"seconds": clock() - begin}


def main() -> None:
    child = Child()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(child, order.pop("op"))(**order)), flush=True)


if __name__ == "__main__":
    main()
