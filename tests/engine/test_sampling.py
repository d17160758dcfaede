"""Choosing a token from logits, and stop texts: no model needed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.engine.sampling import Sampler, Sampling, largest, log_probability
from colibri_lab.engine.stop import StopTexts
from colibri_lab.errors import RequestError

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0], np.float32)


def drawn(how: Sampling, seen: tuple[int, ...] = (), n: int = 400, logits: np.ndarray = LOGITS) -> Counter:
    sampler = Sampler(how, seen)
    return Counter(sampler.choose(logits) for _ in range(n))


def test_frequencies_are_the_softmax() -> None:
    counts = drawn(Sampling(temperature=2.0, seed=1), n=20_000)
    expected = np.exp(LOGITS / 2) / np.exp(LOGITS / 2).sum()
    assert np.allclose([counts[i] / 20_000 for i in range(5)], expected, atol=0.012)


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        ({"top_k": 1}, {1}),  # of two equal ones the lower
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.85, "top_k": 2}, {1, 3}),
        ({"min_p": 0.99}, {1, 3}),
        ({"min_p": 1.0}, {1, 3}),
        ({"min_p": 0.3}, {1, 2, 3}),
        ({"temperature": 1e-9}, {1, 3}),
        ({"temperature": 1e-320}, {1, 3}),
    ],
)
def test_what_is_left_to_choose_from(how: dict, allowed: set[int]) -> None:
    assert set(drawn(Sampling(**({"temperature": 1.5, "seed": 2} | how)))) == allowed


def test_greedy_and_the_repetition_penalty() -> None:
    assert drawn(Sampling()) == {1: 400}
    sampler = Sampler(Sampling(repetition_penalty=2.0), (1,))
    assert [sampler.choose(LOGITS) for _ in range(4)] == [3, 2, 1, 1]  # 3, then 2, then 1.5 = 1.5 = ties to the lower
    negative = np.array([-1.0, -1.5], np.float32)
    assert Sampler(Sampling(repetition_penalty=2.0), (0,)).choose(negative) == 1


def test_infinite_logits_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.5], np.float32)
    assert set(drawn(Sampling(temperature=5.0, seed=3), logits=logits)) == {1, 3}
    assert set(drawn(Sampling(temperature=5.0, top_p=0.9999, seed=3), logits=logits)) == {1, 3}


def test_log_probability_is_the_models_own() -> None:
    total = float(np.log(np.exp(LOGITS.astype(float)).sum()))
    assert log_probability(LOGITS, 2, total) == pytest.approx(2.0 - total)
    assert np.isnan(log_probability(np.array([np.nan], np.float32), 0, 1.0))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.data())
def test_largest_breaks_ties_to_the_lower_index(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    scores = np.array(values, np.float64)
    assert largest(scores, count).tolist() == sorted(np.argsort(-scores, kind="stable")[:count].tolist())


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"top_k": 1.5}, {"min_p": -1}, {"repetition_penalty": 0}, {"seed": True}]
)
def test_wrong_values(wrong: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Sampling(**wrong)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_texts_do_not_depend_on_how_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    def run(parts: list[str]) -> tuple[str, bool]:
        gate, shown = StopTexts(stops), ""
        for part in parts:
            text, stopped = gate.push(part)
            shown += text
            if stopped:
                return shown, True
            assert not any(stop in shown for stop in stops)
        return shown + gate.flush(), False

    whole = "".join(pieces)
    assert run(pieces) == run(list(whole)) == run([whole])
    assert run(pieces)[1] == any(stop in whole for stop in stops)


def test_text_is_held_back_only_while_it_must() -> None:
    gate = StopTexts(["END", "nd."])
    assert [gate.push(piece) for piece in ("The E", "N", "x n", "o ", "EN")] == [
        ("The ", False), ("", False), ("ENx ", False), ("no ", False), ("", False),
    ]  # fmt: skip
    assert gate.push("D of it") == ("", True)
