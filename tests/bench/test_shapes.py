"""Both engines get the same weights: what we write, what llama.cpp's format says, and what was drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from colibri_lab.bench import llama_child, ours
from colibri_lab.bench.shapes import GROUP, Q4, SHAPES, Role, Shape, draw, draw_router, rows_cols
from colibri_lab.model.store import ModelFile
from colibri_lab.ops.pack import unpack

SMALL = Shape("small", 64, 2, 4, 2, 96, 2, 1, 32, vocab=48, positions=64)


def read_q4_0(blocks: np.ndarray) -> np.ndarray:
    """float32 [N, K] of Q4_0 blocks [N, K / 32 * 18], by the format's definition."""
    rows = blocks.reshape(len(blocks), -1, 18)
    scale = np.ascontiguousarray(rows[..., :2]).view(np.float16).astype(np.float32)
    low, high = rows[..., 2:] & 15, rows[..., 2:] >> 4
    return ((np.concatenate([low, high], -1).astype(np.float32) - 8) * scale).reshape(len(blocks), -1)


@pytest.fixture
def drawn() -> Q4:
    return draw(SMALL, Role.GATE, layer=1, expert=3, seed=5)


def test_q4_0_says_what_was_drawn(drawn: Q4) -> None:
    assert np.array_equal(read_q4_0(drawn.q4_0()), drawn.values())
    assert drawn.values().shape == rows_cols(SMALL, Role.GATE) == (96, 64)


def test_draws_repeat_and_differ(drawn: Q4) -> None:
    again = draw(SMALL, Role.GATE, layer=1, expert=3, seed=5)
    assert np.array_equal(again.q4_0(), drawn.q4_0())
    for layer, expert, seed in ((0, 3, 5), (1, 2, 5), (1, 3, 6)):
        assert not np.array_equal(draw(SMALL, Role.GATE, layer, expert, seed).q4_0(), drawn.q4_0())
    assert not np.array_equal(draw(SMALL, Role.UP, layer=1, expert=3, seed=5).q4_0(), drawn.q4_0())


def test_draws_keep_the_scale_of_what_goes_through() -> None:
    shape = SHAPES["nano"]
    x = np.random.default_rng(0).standard_normal(shape.hidden).astype(np.float32)
    y = draw(shape, Role.Q).values() @ x
    assert 0.7 < y.std() < 1.4
    assert 0.7 < (draw_router(shape, 0) @ x).std() < 1.4


def test_our_file_holds_the_same_weights(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path))
    with ModelFile.open(ours.make_model(SMALL, 7)) as file:
        weights = file.weights()
        begin, size = file.extent(1, 2)
        with file.path.open("rb") as data:
            data.seek(begin)
            run = np.frombuffer(data.read(size), np.uint8)
        layouts = file.expert_layout
    for role, layout in zip((Role.GATE, Role.UP, Role.DOWN), layouts, strict=True):
        assert np.array_equal(unpack(run, layout), draw(SMALL, role, 1, 2, 7).values())
    layer = weights.layers[1]
    qkv = np.concatenate([draw(SMALL, role, 1, seed=7).values() for role in (Role.Q, Role.K, Role.V)])
    assert np.array_equal(unpack(layer.attention.qkv.data, layer.attention.qkv.layout), qkv)
    assert np.array_equal(layer.gate, draw_router(SMALL, 1, 7))
    assert np.array_equal(unpack(weights.head.data, weights.head.layout), draw(SMALL, Role.HEAD, seed=7).values())
    assert np.allclose(weights.embedding, draw(SMALL, Role.EMBEDDING, seed=7).values(), rtol=1e-3)


def test_the_peers_tensors_are_those_of_its_architecture() -> None:
    found = dict(llama_child.tensors(SMALL, 7))
    assert len(found) == 3 + SMALL.layers * 12
    experts = found["blk.1.ffn_down_exps.weight"]
    assert experts.shape == (SMALL.experts, SMALL.hidden, SMALL.ffn // GROUP * 18)
    assert np.array_equal(read_q4_0(experts[2]), draw(SMALL, Role.DOWN, 1, 2, 7).values())
    assert found["blk.0.ffn_gate_inp.weight"].dtype == np.float32


def test_bytes_of_a_token_are_those_of_the_findings() -> None:
    assert SHAPES["m0"].active_bytes == pytest.approx(26.6e6, rel=0.01)
    assert SHAPES["m1"].active_bytes == pytest.approx(129e6, rel=0.01)
    assert SHAPES["m2"].active_bytes == pytest.approx(362e6, rel=0.01)


def test_a_routed_shape_has_no_direction_that_all_tokens_share() -> None:
    shape, plain = replace(SHAPES["nano"], branch=0.5), SHAPES["nano"]
    for role, gain in ((Role.UP, 1.0), (Role.DOWN, 0.5), (Role.O, 0.5)):
        codes, drawn = draw(shape, role).codes(), draw(plain, role)
        assert codes.min() == 1 and abs(float(codes.mean()) - 8) < 0.05
        assert ((codes == drawn.codes()) | (drawn.codes() == 0)).all(), "the same numbers otherwise"
        assert np.allclose(draw(shape, role).scales.astype(float), gain * drawn.scales.astype(float), rtol=2e-3)
