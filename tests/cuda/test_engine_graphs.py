"""The whole engine with its decode steps as graphs: the reference's tokens, and those of the steps layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError
from tests.makers import FAMILIES
from tests.parity.models import engine, greedy

from .card import Card, plug_in

PROMPT = [5, 9, 33, 2, 60, 17, 8]
EXPERT = 1 << 16  # bytes of an expert of the models here
SWITCHES: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "off": {"backend": "sim", "cuda_graphs": "off"},
    "on": {"backend": "sim", "cuda_graphs": "on"},
}


def gpu(made: Engine) -> dict[str, int]:
    return {name: int(value) for name, value in made.counters()["gpu"].items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_sixteen_tokens(converted: dict[str, Path], family: str, precision: str) -> None:
    said: dict[str, list[Any]] = {}
    for name, settings in SWITCHES.items():
        with engine(converted[family], precision=precision, **settings) as made:
            said[name] = list(made.generate(PROMPT, max_tokens=16))
            counted = gpu(made)
        if name == "on":
            assert counted["graphs_captured"] == 1 and counted["graph_replays"] == 13
            assert counted["steps_without_graph_prompt"] == counted["steps_without_graph_experts"] == 1
        elif name == "off":
            assert counted["graphs_captured"] == counted["graph_replays"] == 0
            assert counted["steps_without_graph_settings"] == 16
    ids = {name: [token.id for token in tokens] for name, tokens in said.items()}
    assert ids["on"] == ids["off"] == ids["reference"] and len(ids["on"]) == 16
    for one, other in zip(said["on"], said["off"], strict=True):
        assert one.logprob == other.logprob
        assert np.array_equal(one.experts, other.experts) and np.array_equal(one.weights, other.weights)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sequences_come_and_go(converted: dict[str, Path], mode: str) -> None:
    """Batches of one to six, that shrink as texts end, and a sampled request that joins in the middle."""
    said: dict[str, list[Any]] = {}
    for name, settings in SWITCHES.items():
        with engine(converted["mixtral"], engine_mode=mode, max_batch_size=6, prefill_chunk=4, **settings) as made:
            texts: list[Any] = []
            first = made.generate(PROMPT, max_tokens=20)
            texts.append([next(first).id for _ in range(6)])
            lengths = dict.fromkeys(range(5))
            for length in lengths:
                prompt = PROMPT[: 2 + length]
                lengths[length] = made.generate(prompt, max_tokens=4 + 3 * length, temperature=0.9, seed=length)
            alive = {i: it for i, it in lengths.items() if it is not None}
            out: dict[int, list[int]] = {i: [] for i in alive}
            while alive:
                for i, it in list(alive.items()):
                    token = next(it, None)
                    if token is None:
                        del alive[i]
                    else:
                        out[i].append(token.id)
            said[name] = [*texts, [token.id for token in first], *out.values()]
            counted = gpu(made)
            if name == "on":
                assert counted["graphs_captured"] >= 3 and counted["graph_replays"] > 8, counted
    assert said["on"] == said["off"] == said["reference"]
    assert [len(text) for text in said["on"]] == [6, 14, 4, 7, 10, 13, 16]


def test_experts_are_brought_until_all_are_there(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One a step, through a cache on the host that holds two of them; then every step is a graph."""
    monkeypatch.setattr("colibri_lab.engine.whole.BRING", EXPERT)
    with (
        engine(converted["mixtral"], backend="sim", cuda_graphs="off") as plain,
        engine(converted["mixtral"], backend="sim", expert_cache_bytes=2 * EXPERT) as made,
    ):
        assert greedy(made, [5], 16) == greedy(plain, [5], 16)
        counted = gpu(made)
        assert counted["experts_resident"] == counted["experts_capacity"]
        assert 1 < counted["steps_without_graph_experts"] < 12
        assert counted["graphs_captured"] + counted["graph_replays"] + counted["steps_without_graph_experts"] == 15


class Plugin:
    """A router of one's own: the two experts of the largest logits."""

    def select(self, layer: int, logits: Any) -> tuple[Any, Any]:
        best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
        chosen = np.exp(np.take_along_axis(logits, best, 1))
        return best.astype(np.int32), (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"gpu_cache_bytes": 4 * EXPERT}, "gpu_cache_bytes has room for 4 of the"),
        ({"expert_placement": {"*.1": "cpu"}}, "expert_placement leaves experts to the processor"),
        ({"attention": "expert_local"}, "expert_local is not captured"),
        ({"router": Plugin()}, "the router is a plugin"),
    ],
    ids=["budget", "placement", "attention", "router"],
)
def test_where_there_is_no_graph(converted: dict[str, Path], settings: dict[str, Any], why: str) -> None:
    """`on` is an error that says why; `auto` goes without, says why, and counts."""
    with (
        pytest.raises(ConfigError, match=f"cuda_graphs: on, but .*{why}"),
        engine(converted["mixtral"], backend="sim", cuda_graphs="on", **settings),
    ):
        raise AssertionError("an engine was made")
    with engine(converted["mixtral"], backend="sim", **settings) as made:
        greedy(made, PROMPT, 3)
        assert why in made.describe()["cuda_graphs"]
        counted = gpu(made)
        assert counted["graphs_captured"] == 0 and counted["steps_without_graph_settings"] == 3


@pytest.mark.parametrize("switch", ["on", "off"])
def test_without_a_gpu_the_switch_is_refused(converted: dict[str, Path], switch: str) -> None:
    with (
        pytest.raises(ConfigError, match="cuda_graphs: backend reference uses no GPU"),
        engine(converted["mixtral"], backend="reference", cuda_graphs=switch),
    ):
        raise AssertionError("an engine was made")


def test_on_a_card(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that does everything late gives the simulator's tokens, and takes nothing while it decodes."""
    with engine(converted["qwen2_moe"], backend="sim", cuda_graphs="off") as made:
        said = greedy(made, PROMPT, 8)
    card = plug_in(monkeypatch, Card())
    with engine(converted["qwen2_moe"], backend="cuda", cuda_graphs="on") as made:
        taken = card.mallocs
        assert greedy(made, PROMPT, 8) == said
        assert card.mallocs == taken and gpu(made)["graph_replays"] == 5
    assert card.clean
