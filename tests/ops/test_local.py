"""Expert-local attention: the tokens it should see and no other, in C as in NumPy, whatever slots and neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.ops.reference import ReferenceBackend, rms_norm

from .models import LEVELS, Bound, Shape, cpu, make

SHAPE = Shape(
    hidden=100, ffn=24, experts=6, top_k=2, shared=16, layers=4, dense=(1,), window=17, vocab=90, recent=4, sinks=2
)
TOKENS = np.random.default_rng(3).integers(0, 90, 40).tolist()
MODEL = make(SHAPE, 21)


def bound(backend: Any, shape: Shape = SHAPE, **how: Any) -> Bound:
    return Bound(backend, shape, model=MODEL, **how)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32"])
def test_kernel_and_reference_see_the_same(level: str, kv_dtype: str) -> None:
    shape = replace(SHAPE, kv_dtype=kv_dtype)
    plain, fast = bound(ReferenceBackend(), shape), bound(cpu(level), shape)
    want, got = plain.run(TOKENS, chunk=3), fast.run(TOKENS, chunk=3)
    assert np.abs(want - got).max() < 1e-3 * np.abs(want).max()
    assert np.array_equal(plain.kv.seen, fast.kv.seen) and np.array_equal(plain.kv.first, fast.kv.first)
    read, exact, guessed, recalled = fast.kv.seen.T
    assert (read[[0, 2, 3]] < exact[[0, 2, 3]]).all() and read[1] == exact[1] == 40 * 41 / 2  # layer 1 is dense
    assert exact[0] == sum(min(17, t + 1) for t in range(40))
    assert guessed.tolist() == [34, 0, 34, 34] and (recalled[[0, 2, 3]] > 17).all() and (recalled <= guessed).all()
    control = bound(cpu(level), replace(shape, recent=0)).run(TOKENS, chunk=3)
    assert np.abs(control - got)[8:].max() > 1e-2 * np.abs(want).max()


def test_all_levels_chunks_threads_and_slots_give_the_same_bits() -> None:
    want = bound(cpu(LEVELS[0])).run(TOKENS)
    for chunk, threads, level, shuffle in ((4, 1, -1, 1), (3, 2, 0, 2), (2, 2, -1, 5), (1, 2, 0, 6)):
        backend = cpu(LEVELS[level], threads=threads)
        assert np.array_equal(bound(backend, shuffle=shuffle).run(TOKENS, chunk=chunk), want)
        backend.close()
    many = replace(SHAPE, recent=16, capacity=16)  # more rows than threads look at by head
    want = bound(cpu(LEVELS[0]), many).run(TOKENS)
    for chunk in (8, 13, 16):
        assert np.array_equal(bound(cpu(LEVELS[0], threads=2), many).run(TOKENS, chunk=chunk), want)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_other_sequences_do_not_matter(data: st.DataObject) -> None:
    prompts = [data.draw(st.lists(st.integers(0, 69), min_size=1, max_size=25)) for _ in range(3)]
    level = data.draw(st.sampled_from(LEVELS))
    alone = [bound(cpu(level)).run(prompt) for prompt in prompts]
    order = data.draw(st.permutations([seat for seat, prompt in enumerate(prompts) for _ in prompt]))
    together, left = bound(cpu(level), shuffle=1), [list(prompt) for prompt in prompts]
    got: list[list[np.ndarray]] = [[], [], []]
    while order:
        count = data.draw(st.integers(1, 4))  # no more rows of a sequence in a step than `recent`
        now, order = order[:count], order[count:]
        for seat, row in zip(now, together.step([(seat, left[seat].pop(0)) for seat in now]), strict=True):
            got[seat].append(row)
    assert all(np.array_equal(np.array(mine), want) for mine, want in zip(got, alone, strict=True))


def test_near_tokens_alone_are_exact_attention() -> None:
    """Nothing lies beyond the newest and the first: the bits of exact attention, and no expert is guessed."""
    near = replace(SHAPE, recent=38, sinks=2)
    local, exact = bound(cpu(), near), bound(cpu(), replace(SHAPE, recent=0))
    assert np.array_equal(local.run(TOKENS), exact.run(TOKENS))
    assert local.kv.seen[:, 2:].sum() == 0 and np.array_equal(local.kv.seen, exact.kv.seen)


@pytest.mark.parametrize("backend", [*LEVELS, "numpy"])
@pytest.mark.parametrize("layer", [0, 3])  # with a sliding window and without
def test_it_reads_its_experts_tokens_and_no_other(backend: str, layer: int) -> None:
    """NaN in the keys that a query must not see leaves no trace; in any one that it must see it shows."""
    state = bound(ReferenceBackend() if backend == "numpy" else cpu(backend))
    state.run(TOKENS[:30])
    kv, rows, weights = state.kv, state.rows, MODEL[0].layers[layer]
    rows.token[0], rows.seat[0], rows.position[0] = TOKENS[30], 0, 30
    state.backend.embed(1)
    x = rows.x[0].copy()
    gate = weights.gate @ rms_norm(x, weights.post_norm, MODEL[0].norm_eps)
    guess = np.argsort(-gate, kind="stable")[:2]
    begin = 31 - 17 if weights.attention.window else 0
    first = kv.first[0, layer, :30]
    seen = [t for t in range(begin, 30) if t < 2 or t > 30 - 4 or first[t] in guess]
    unseen = sorted(set(range(30)) - set(seen))
    assert set(first[seen]) - set(guess) and len(unseen) > 5 and set(unseen) & set(range(begin, 30))

    def attend(poisoned: list[int]) -> np.ndarray:
        rows.x[0] = x
        at = kv.where[0, layer, poisoned]
        keep = kv.k[at].copy()
        kv.k[at] = np.nan
        state.backend.attn_router(layer, 1)
        kv.k[at] = keep
        return rows.x[0].copy()

    clean = attend([])
    assert np.isfinite(clean).all() and np.array_equal(attend(unseen), clean)
    for t in seen:
        rows.router_logits[0] = 0
        with pytest.raises(ValueError, match="not finite"):
            attend([t])


@pytest.mark.parametrize("backend", [*LEVELS, "numpy"])
def test_a_first_expert_out_of_range_is_refused(backend: str) -> None:
    state = bound(ReferenceBackend() if backend == "numpy" else cpu(backend))
    state.run(TOKENS[:30])
    for wrong in (6, -2, 30000):
        state.kv.first[0, 3, 10] = wrong
        with pytest.raises(IndexError):
            state.step([(0, 5)])
