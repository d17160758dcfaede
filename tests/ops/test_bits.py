"""A row's bits depend on the row alone: not on neighbours, waves, threads, slots, frames or ISA level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.ops.reference import ReferenceBackend
from colibri_lab.ops.types import ExpertPages

from .models import FORMATS, LEVELS, Bound, Shape, cpu, make, with_format

TOKENS = [3, 9, 4, 69, 0, 1, 5, 33, 8, 21, 2]
SHAPE = Shape(hidden=100, ffn=72, experts=6, top_k=3, shared=40, layers=3, dense=(1,), bias=True, window=6, vocab=90)


def baseline(shape: Shape, precision: str, level: str, model) -> np.ndarray:
    return Bound(cpu(level, precision), shape, model=model).run(TOKENS)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "group"), [("fp32", 0), ("fp16", 0), ("int8", 64), ("int4", 32), ("int4", 128)])
def test_chunks_waves_threads_slots(dtype, group, level, precision):
    shape = with_format(SHAPE, dtype, group)
    model = make(shape, 7)
    want = baseline(shape, precision, level, model)
    for chunk, threads, waves, shuffle in ((2, 1, (), 1), (9, 2, (1, 4), None), (11, 1, (3,), 5), (1, 2, (2, 3, 5), 2)):
        backend = cpu(level, precision, threads)
        got = Bound(backend, shape, model=model, shuffle=shuffle).run(TOKENS, chunk=chunk, waves=waves)
        assert np.array_equal(got, want), (chunk, threads, waves)
        backend.close()


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_levels_agree(dtype, group, precision):
    shape = with_format(replace(SHAPE, kv_dtype="fp16", qk_norm="head", tied=True), dtype, group)
    model = make(shape, 8)
    results = [baseline(shape, precision, level, model) for level in LEVELS]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "group"), [f for f in FORMATS if f[0] in ("int8", "int4")])
def test_many_rows_are_multiplied_as_one_by_one(dtype, group, level):
    """Tiles of sixteen rows, a last one that is not full, and a few rows left; several tiles of inputs."""
    wide = replace(SHAPE, hidden=300, ffn=136, positions=96, capacity=96)
    shape = with_format(wide, dtype, group)
    model, tokens = make(shape, 8), np.random.default_rng(0).integers(0, 89, 75).tolist()
    backend = cpu(level, "fast")
    want = Bound(backend, shape, model=model).run(tokens, chunk=1)
    for chunk in (75, 43, 16, 13):
        assert np.array_equal(Bound(backend, shape, model=model).run(tokens, chunk=chunk), want), chunk
    threads = cpu(level, "fast", 2)
    assert np.array_equal(Bound(threads, shape, model=model).run(tokens, chunk=75), want)
    threads.close()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_other_sequences_do_not_matter(data):
    """Three sequences, interleaved at random, each gives the bits it gives alone."""
    shape = with_format(SHAPE, *data.draw(st.sampled_from(FORMATS)))
    precision, level = data.draw(st.sampled_from(["exact", "fast"])), data.draw(st.sampled_from(LEVELS))
    model = make(shape, 9)
    prompts = [data.draw(st.lists(st.integers(0, 69), min_size=1, max_size=9)) for _ in range(3)]
    alone = [Bound(cpu(level, precision), shape, model=model).run(p) for p in prompts]
    order = data.draw(st.permutations([seat for seat, p in enumerate(prompts) for _ in p]))
    threads = data.draw(st.sampled_from([1, 2]))
    together, left = Bound(cpu(level, precision, threads), shape, model=model, shuffle=1), [list(p) for p in prompts]
    got: list[list[np.ndarray]] = [[], [], []]
    while order:
        n = data.draw(st.integers(1, 9))
        step, order = order[:n], order[n:]
        logits = together.step([(seat, left[seat].pop(0)) for seat in step])
        for seat, row in zip(step, logits, strict=True):
            got[seat].append(row)
    together.backend.close()
    for mine, want in zip(got, alone, strict=True):
        assert np.array_equal(np.array(mine), want)


def test_reference_rows_are_alone_too():
    model = make(SHAPE, 7)
    want = Bound(ReferenceBackend("exact"), SHAPE, model=model).run(TOKENS)
    got = Bound(ReferenceBackend("exact"), SHAPE, model=model, shuffle=3).run(TOKENS, chunk=4, waves=(2,))
    assert np.array_equal(got, want)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_frames_do_not_matter(dtype, group, level):
    """Experts of several pages, moved to other frames between two runs; a row group crosses frames."""
    shape = with_format(Shape(hidden=300, ffn=320, experts=3, layers=1), dtype, group)
    weights, pages = make(shape, 11)
    assert weights.expert[2].pages > 1
    want = Bound(cpu(level), shape, model=(weights, pages)).run(TOKENS[:4], chunk=2)
    order = np.random.default_rng(0).permutation(len(pages.frames))
    table = np.argsort(order).astype(np.int32)[pages.table]
    wide = np.pad(table, ((0, 0), (0, 0), (0, 2)), constant_values=-1)  # a table with room for larger experts
    moved = ExpertPages(np.ascontiguousarray(pages.frames[order]), wide)
    for backend in (cpu(level), ReferenceBackend()):
        got = Bound(backend, shape, model=(weights, moved)).run(TOKENS[:4], chunk=2)
        assert np.array_equal(got, want) if backend.name == "cpu" else np.abs(got - want).max() < 1e-3


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_poisoned_padding_does_not_show(dtype, group, level, precision):
    """Hidden 40 and widths 25 and 51 fill no tile; padding of 0xFF is NaN in every float that is padding."""
    shape = with_format(Shape(ffn=25, shared=51, layers=2, dense=(1,), vocab=71, tied=True), dtype, group)
    clean, dirty = make(shape, 12), make(shape, 12, poison=0xFF)
    assert not np.array_equal(clean[1].frames, dirty[1].frames)
    want = Bound(cpu(level, precision), shape, model=clean).run(TOKENS, chunk=5)
    assert np.isfinite(want).all()
    assert np.array_equal(Bound(cpu(level, precision), shape, model=dirty).run(TOKENS, chunk=5), want)


@pytest.mark.parametrize("level", LEVELS)
def test_ties_go_to_the_lower_index(level):
    shape = Shape(experts=8, top_k=2)
    weights, pages = make(shape)
    flat = replace(weights, layers=tuple(replace(layer, gate=np.zeros_like(layer.gate)) for layer in weights.layers))
    bound = Bound(cpu(level), shape, model=(flat, pages))
    for _ in range(3):
        bound.step([(0, 3), (1, 4)])
        assert bound.rows.experts[:2].tolist() == [[0, 1], [0, 1]] and (bound.rows.weights[:2] == 0.5).all()
    bound.rows.x[:] = 0
    bound.backend.head(1)
    assert bound.rows.argmax[0] == 0 and bound.rows.logsumexp[0] == pytest.approx(np.log(shape.vocab))
