"""Tokens chosen on the device are the sampler's own: the same seed, the same logits, the same token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from colibri_lab.engine.sampling import Sampler, Sampling
from colibri_lab.ops.cuda_sample import MOST_VOCAB, Chooser, Draw
from colibri_lab.ops.launch import Kernels
from colibri_lab.ops.products import upload
from colibri_lab.ops.simulator import SimDevice

Logits = NDArray[np.float32]


def choose(logits: Logits, how: list[dict[str, Any]], seen: list[list[int]], draws: list[float],
           order: str = "forward") -> tuple[list[int], list[bool]]:  # fmt: skip
    """One launch over rows of logits; row r has seat n - 1 - r."""
    device, n = SimDevice(order, 3), len(how)
    chooser, seats = Chooser(Kernels(device), logits.shape[1], n, n), list(range(n))[::-1]
    for seat, ids in zip(seats, seen, strict=True):
        chooser.begin(seat, ids)
    rows = [Draw(**h, random=draw) for h, draw in zip(how, draws, strict=True)]
    token, sure, value = chooser.choose(upload(device, logits), seats, rows)
    assert np.array_equal(value, logits[np.arange(n), token], equal_nan=True)
    return token.tolist(), sure.tolist()


def expected(logits: Logits, how: dict[str, Any], seen: list[int], seed: int) -> int:
    return Sampler(Sampling(**how, seed=seed), seen).choose(logits)


def compare(logits: Logits, how: list[dict[str, Any]], seed: int, order: str = "forward", sure: bool = True) -> None:
    """Each row with its likeliest token and some others seen."""
    rng = np.random.default_rng(seed)
    seen = [[int(row.argmax()), *rng.integers(0, logits.shape[1], 20).tolist()] for row in logits]
    draws = [random.Random(seed + r).random() if h.get("temperature") else 0.0 for r, h in enumerate(how)]
    token, certain = choose(logits, how, seen, draws, order)
    want = [expected(row, h, s, seed + r) for r, (row, h, s) in enumerate(zip(logits, how, seen, strict=True))]
    assert [t for t, c in zip(token, certain, strict=True) if c] == [w for w, c in zip(want, certain, strict=True) if c]
    assert not sure or all(certain)


KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 2.0, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1e-3},
    {"temperature": 50.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**6, "top_p": 0.999, "repetition_penalty": 0.8},
]


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize("vocab", [1, 2, 31, 511, 512, 513, 1500])
def test_the_samplers_own_token(vocab: int, order: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((len(KINDS), vocab)) * 3).astype(np.float32)
    logits[1::2] -= 12
    for seed in range(3):
        compare(logits, KINDS, seed, order)


def test_many_draws_meet_every_part_of_the_distribution() -> None:
    """A flat row and a steep one, draws over the whole of 0 to 1, its ends among them."""
    logits = np.stack([np.zeros(64), np.linspace(-4, 4, 64)]).astype(np.float32)
    for at in (0.0, 1e-300, 0.25, 0.4999, 0.75, 0.999, 1 - 2**-53):
        for how in ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.51}, {"temperature": 1.0, "top_k": 7}):
            token, sure = choose(logits, [how, how], [[], []], [at, at])
            for row, chosen, certain in zip(logits, token, sure, strict=True):
                sampler = Sampler(Sampling(**how), [])
                sampler._random = type("Fixed", (), {"random": staticmethod(lambda at=at: at)})()
                assert not certain or chosen == sampler.choose(row)
            assert at not in (0.0, 0.4999, 0.999) or all(sure)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.4}])
def test_ties_go_to_the_lower_index(how: dict[str, Any]) -> None:
    logits = np.zeros((4, 700), np.float32)
    logits[:, 100::100] = 2
    logits[2:, :] *= -1
    compare(logits, [how] * 4, 5)


def test_a_penalised_token_is_remembered() -> None:
    """A sure choice counts as seen from then on, as in the sampler; zeros of both signs are one number."""
    logits = np.array([[3, 2.9, 2.8, -0.0, 0.0]], np.float32)
    device, sampler = SimDevice(), Sampler(Sampling(repetition_penalty=1.5), [])
    chooser = Chooser(Kernels(device), 5, 1, 1)
    chooser.begin(0, [])
    on_device = upload(device, logits)
    said = [chooser.choose(on_device, [0], [Draw(repetition_penalty=1.5)])[0].item() for _ in range(5)]
    assert said == [sampler.choose(logits[0]) for _ in range(5)] == [0, 1, 2, 0, 0]
    chooser.begin(0, [])
    assert chooser.choose(on_device, [0], [Draw(repetition_penalty=1.5)])[0].item() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_left_to_the_host(bad: float) -> None:
    logits = np.ones((2, 40), np.float32)
    logits[0, 7] = bad
    logits[1, :39] = -np.inf
    token, sure = choose(logits, [{"temperature": 1.0}] * 2, [[], []], [0.5, 0.5])
    assert sure == [False, True] and token[1] == 39


def test_a_draw_on_an_edge_is_left_to_the_host() -> None:
    """Of two equal tokens, a draw of one half is the first's last or the second's first, as sums are rounded."""
    logits = np.zeros((3, 2), np.float32)
    how = {"temperature": 1.0}
    assert choose(logits, [how] * 3, [[]] * 3, [0.5 - 1e-15, 0.5, 0.5 + 1e-15])[1] == [False] * 3
    token, sure = choose(logits, [how] * 3, [[]] * 3, [0.5 - 1e-9, 0.5 + 1e-9, 0.999])
    assert (token, sure) == ([0, 1, 1], [True] * 3)


def test_a_cut_on_an_edge_is_left_to_the_host() -> None:
    logits = np.zeros((2, 4), np.float32)
    token, sure = choose(logits, [{"temperature": 1.0, "top_p": p} for p in (0.5, 0.5 + 1e-9)], [[]] * 2, [0.9, 0.9])
    assert sure == [False, True] and token[1] == 2
    close = np.array([[1.0, 1.0 + 2**-23, 0, 0]], np.float32)  # at this temperature their probabilities are one number
    assert choose(close, [{"temperature": 1e6, "top_p": 0.2}], [[]], [0.1])[1] == [False]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_row(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 200))
    values = data.draw(st.sampled_from([[-1.0, 0.0, 0.5, 2.0], [float(i) / 8 for i in range(-40, 40)], [1e-30, 3e38]]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = rng.choice(values, (1, vocab)).astype(np.float32)
    how = {
        "temperature": data.draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1e6])),
        "top_k": data.draw(st.integers(0, vocab + 2)),
        "top_p": data.draw(st.sampled_from([0.0, 0.1, 0.77, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0])),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 1.25, 0.5])),
    }
    compare(logits, [how], data.draw(st.integers(0, 99)), sure=False)


def test_a_draw_is_hardly_ever_left_to_the_host() -> None:
    """Of a thousand random ones, none."""
    logits = (np.random.default_rng(8).standard_normal((50, 300)) * 4).astype(np.float32)
    for seed in range(0, 1000, 50):
        compare(logits, [KINDS[6]] * 50, seed)


def test_refusals() -> None:
    kernels = Kernels(SimDevice())
    with pytest.raises(ValueError, match=f"{MOST_VOCAB + 1} tokens is more than the {MOST_VOCAB}"):
        Chooser(kernels, MOST_VOCAB + 1, 1, 1)
    chooser = Chooser(kernels, 4, 1, 2)
    with pytest.raises(IndexError, match="seats"):
        chooser.choose(upload(kernels.device, np.zeros((1, 4), np.float32)), [2], [Draw()])
    assert len(chooser.choose(upload(kernels.device, np.zeros((0, 4), np.float32)), [], [])[0]) == 0
