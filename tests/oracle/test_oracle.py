"""The float64 oracle agrees with transformers' goldens, and every misreading shows: else parity would prove nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.makers import FAMILIES, exact_4bit, make, rounded

from . import embedded
from .goldens import FOLDER, LEAST_MARGIN, LEAST_ROUTING, NEW_TOKENS, error, load
from .numpy_oracle import WRONG, Oracle
from .settings import SETTINGS, WINDOW


@pytest.mark.parametrize("key", SETTINGS)
def test_oracle_agrees_with_transformers(key: str) -> None:
    golden = load(key)
    made = golden.checkpoint()
    oracle = Oracle(made.config, made.tensors)  # as our converter sees the config: nulls written out
    for run in golden.runs:
        logits, routing = oracle.forward(run.prompt)
        assert error(logits, run.logits) < 1e-5
        assert len(run.tokens) == NEW_TOKENS
        whole, all_routing = oracle.forward(run.prompt + run.tokens[:-1])
        assert whole[len(run.prompt) - 1 :].argmax(1).tolist() == run.tokens
        assert min(routing.margin(), all_routing.margin()) > LEAST_ROUTING
        second, first = np.sort(whole[len(run.prompt) - 1 :], axis=1)[:, -2:].T
        assert ((first - second) / np.abs(whole[len(run.prompt) - 1 :]).max(1)).min() > LEAST_MARGIN


@pytest.mark.parametrize(("key", "wrong"), [(key, wrong) for key, s in SETTINGS.items() for wrong in s.wrong])
def test_misreading_shows(key: str, wrong: str) -> None:
    """Control: the wrong reading of a setting differs by far more than parity allows."""
    golden = load(key)
    made = golden.checkpoint()
    run = golden.runs[-1]
    assert error(Oracle(made.config, made.tensors, {wrong}).logits(run.prompt), run.logits) > 1e-2


def test_every_misreading_is_used() -> None:
    assert WRONG == {wrong for setting in SETTINGS.values() for wrong in setting.wrong}


def test_windows_are_told_apart_only_past_their_edge() -> None:
    """W - 1 and W tokens see everything; from W + 1 on the window cuts, and the controls say so."""
    golden = load("mixtral-window")
    made = golden.checkpoint()
    full = Oracle(made.config, made.tensors, {"no_window"})
    by_length = {len(run.prompt): error(full.logits(run.prompt), run.logits) for run in golden.runs}
    assert by_length[WINDOW - 1] < 1e-5 and by_length[WINDOW] < 1e-5 and by_length[WINDOW + 1] > 1e-2


def test_goldens_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3 << 20


def test_embedded_golden_is_of_this_model() -> None:
    golden = embedded.load()
    assert str(golden["hash"]) == embedded.model_hash()
    assert golden["ids"].tolist() == embedded.encode(embedded.FIXED)
    assert {name.removeprefix("ppl/") for name in golden if name.startswith("ppl/")} == set(embedded.validation())


def test_embedded_oracle_agrees() -> None:
    """The same float64 forward, on the trained model's fp16 values."""
    import json

    from safetensors.numpy import load_file

    config = json.loads((embedded.MODEL / "config.json").read_text())
    golden = embedded.load()
    ids = golden["ids"].tolist()[:24]
    ours = Oracle(config, load_file(embedded.MODEL / "model.safetensors")).logits(ids)
    assert error(ours, golden["logits"][: len(ids)]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_makers_repeat_and_depend_on_the_seed(family: str) -> None:
    assert make(family, 3).hash == make(family, 3).hash != make(family, 4).hash


def test_exact_4bit_values_are_code_points() -> None:
    values = exact_4bit(np.random.default_rng(0), 24, 80)
    codes = values / 2.0**-5
    assert np.array_equal(codes, np.round(codes)) and codes.min() == -8 and codes.max() == 7
    assert all((codes[:, start : start + 32] == -8).any(1).all() for start in range(0, 80, 32))


def test_bf16_rounds_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.3e38, 1e-40], np.float32)
    assert rounded(values, "BF16").tolist()[:3] == [1.0, 1.0, 1.015625]
