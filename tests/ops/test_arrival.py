"""expert_ffn while pages are still on their way: the bits of a table that was full from the start, on every level."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.types import COMING, MissingPage

from .models import LEVELS, Bound, Shape, cpu, make

WIDE = {"hidden": 320, "ffn": 400, "experts": 6, "top_k": 3, "capacity": 12}  # an expert has several pages
BACKENDS = [*LEVELS, "reference"]


def bound(name: str, shape: Shape, threads: int, precision: str = "exact") -> Bound:
    backend = ReferenceBackend(precision) if name == "reference" else cpu(name, precision, threads)
    return Bound(backend, shape, model=make(shape, 3))


def arrive(table: np.ndarray, right: np.ndarray, seed: int, pause: float, delay: float = 0.006) -> threading.Thread:
    """Fills the entries that are on their way, in random order, from another thread, after `delay` seconds."""
    places = [tuple(at) for at in np.argwhere(table == COMING)]
    random.Random(seed).shuffle(places)

    def run() -> None:
        time.sleep(delay)  # the kernel has begun by then, where the machine is not busy
        for at in places:
            time.sleep(pause)
            table[at] = right[at]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def lately(made: Bound, dice: random.Random, fillers: list[threading.Thread], delay: float) -> Callable[..., None]:
    """made's expert_ffn, with pages of some chosen experts taken out of the table when it begins."""
    ffn, table, full = made.backend.expert_ffn, made.pages.table, made.pages.table.copy()

    def late(layer: int, n: int, first: int, last: int) -> None:
        chosen = sorted(set(made.rows.experts[:n].ravel().tolist()))
        for expert in dice.sample(chosen, dice.randint(1, len(chosen))):
            table[layer, expert, dice.randrange(table.shape[2]) :] = COMING
        fillers.append(arrive(table, full, dice.randrange(99), 0.0001, delay))
        ffn(layer, n, first, last)

    return late


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "int4"])
@pytest.mark.parametrize("name", BACKENDS)
def test_any_order_of_arrival_gives_the_same_bits(name: str, dtype: str, threads: int) -> None:
    shape = Shape(**WIDE, dtype=dtype, group=32 if dtype == "int4" else 0, shared=64, kv_dtype="fp32")
    tokens = [(i % 3, 3 + i) for i in range(7)]
    precision = "fast" if dtype == "int4" else "exact"
    right = bound(name, shape, threads, precision)
    expected = right.step(tokens)
    right_x = right.rows.x[:7].copy()
    waited = 0
    for seed in range(12):
        if seed >= 4 and waited:
            break
        made, fillers = bound(name, shape, threads, precision), list[threading.Thread]()
        made.backend.expert_ffn = lately(made, random.Random(seed), fillers, 0.006 * 2 ** max(0, seed - 3))
        assert np.array_equal(made.step(tokens), expected) and np.array_equal(made.rows.x[:7], right_x)
        waited += int(made.pages.waited[0])
        for thread in fillers:
            thread.join()
    assert waited > 0


@pytest.mark.parametrize("name", BACKENDS)
def test_a_page_that_will_not_come_ends_the_call(name: str) -> None:
    shape = Shape(**WIDE)
    made = bound(name, shape, 2)
    made.backend.embed(1)
    made.backend.attn_router(0, 1)
    made.rows.kv_dst[0] = 0
    expert = int(made.rows.experts[0, 1])
    saved = made.pages.table.copy()
    made.pages.table[0, expert, -1] = COMING
    lost = np.full_like(saved, -1)
    thread = arrive(made.pages.table, lost, 0, 0.01)
    with pytest.raises(MissingPage, match=f"layer 0 expert {expert} "):
        made.backend.expert_ffn(0, 1, 0, shape.experts)
    thread.join()
    made.pages.table[:] = saved
    made.backend.expert_ffn(0, 1, 0, shape.experts)


@pytest.mark.parametrize("name", BACKENDS)
def test_groups_of_rows_give_the_bits_of_one_step(name: str) -> None:
    """Rows in groups, layer by layer and interleaved, are the rows of one call; a group outside the step is refused."""
    shape = Shape(**WIDE, shared=64)
    tokens = [(0, 5), (0, 6), (1, 7), (2, 8), (2, 9), (1, 4)]
    whole = bound(name, shape, 1)
    expected = whole.step(tokens)
    made = bound(name, shape, 1)
    rows, n = made.rows, len(tokens)
    for r, (seat, token) in enumerate(tokens):
        rows.seat[r], rows.token[r], rows.position[r] = seat, token, made.next[seat]
        made.next[seat] += 1
    made.backend.embed(n)
    for layer in range(shape.layers):
        rows.kv_dst[:n] = [made.free.pop() for _ in range(n)]
        for at, count in ((0, 2), (2, 1), (3, 3)):
            made.backend.attn_router(layer, count, at)
        for first, last in ((0, 2), (2, shape.experts)):  # between two waves of a group the others have theirs
            for at, count in ((0, 2), (2, 1), (3, 3)):
                made.backend.expert_ffn(layer, count, first, last, at)
    rows.out_row[:n] = np.arange(n)
    made.backend.head(n)
    assert np.array_equal(rows.logits[:n], expected)
    for at, count in ((-1, 1), (11, 2), (0, 13)):
        with pytest.raises(IndexError):
            made.backend.attn_router(0, count, at)
