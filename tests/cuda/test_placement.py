"""`expert_placement`: what it says is done, is counted, and changes no bit of a logit, whatever the precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab import placement
from colibri_lab.config import Config
from colibri_lab.errors import ConfigError
from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.cuda_experts import Sharing
from colibri_lab.ops.simulator import SimDevice
from tests.ops.models import FORMATS, Bound, Shape, make, with_format
from tests.parity.models import engine, greedy, logits

from .card import Card, plug_in

PROMPT = [5, 9, 33, 2, 60, 17, 8]
EXPERT = 1 << 16  # bytes of an expert of the models here
SPARSE = (True, False, True)


def test_rules_of_layers_experts_and_patterns() -> None:
    def where(value: Any) -> list[str]:
        return [
            " ".join(placement.PLACES[p] for p in row) for row in placement.resolve(placement.rules(value), SPARSE, 3)
        ]

    assert where("cpu") == ["cpu cpu cpu", "gpu gpu gpu", "cpu cpu cpu"]
    assert where({"2": "cpu"}) == where({2: "cpu"}) == where({"2.*": "cpu"}) == [*["gpu gpu gpu"] * 2, "cpu cpu cpu"]
    assert where({"*": "auto", "*.1": "cpu", "0.1": "gpu"}) == ["auto gpu auto", "gpu gpu gpu", "auto cpu auto"]
    assert where({"0.[12]": "cpu", "?.2": "gpu"})[0] == "gpu cpu gpu"
    assert placement.rules(None) == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("gpus", "expert_placement: 'gpus' is none of gpu, cpu, auto; did you mean gpu"),
        ({"0": "cuda"}, "expert_placement: 'cuda' is none of gpu, cpu, auto"),
        ({"0": 1}, "expert_placement: 0: 1 is none of gpu, cpu, auto"),
        ({0.1: "cpu"}, "expert_placement: 0.1 is no pattern; write it in quotes"),
        (["gpu"], "expert_placement: a word (gpu, cpu, auto) or a mapping"),
    ],
)
def test_wrong_values(value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.make({"expert_placement": value}, "some.yaml")
    assert str(refused.value).startswith(f"some.yaml: {says}")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "cpu", "expert_placement": "gpu"}, "expert_placement: backend cpu uses no GPU"),
        (
            {"backend": "reference", "expert_placement": {"0": "auto"}},
            "expert_placement: backend reference uses no GPU",
        ),
        ({"backend": "sim", "expert_placement": {"7": "cpu"}}, "'7' matches no expert: there are layers 0 to 1, and"),
        ({"backend": "sim", "expert_placement": {"0.9": "cpu"}}, r"'0\.9' matches no expert.*did you mean '0"),
        ({"backend": "sim", "expert_placement": "cpu", "gpu_cache_bytes": "1MiB"}, "leaves no expert to the GPU"),
    ],
)
def test_refusals_at_load(converted: dict[str, Path], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), engine(converted["mixtral"], **settings):
        raise AssertionError("an engine was made")


def steps(shape: Shape, model: Any, precision: str, sharing: Sharing | None) -> tuple[list[Any], dict[str, int]]:
    backend = CudaBackend(SimDevice("random", 3), precision, sharing)
    bound = Bound(backend, shape, model=model)
    made = [
        bound.step([(0, 3), (1, 4), (0, 7), (2, 9)], waves=(2,)),
        bound.step([(1, 9)]),
        bound.step([(0, 5), (2, 1)]),
    ]
    counts = backend.counters()
    backend.close()
    return made, counts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_placement_changes_a_bit(data: st.DataObject) -> None:
    """Any places of any experts, any room on the device, every format, both precisions, waves and batches."""
    dtype, group = data.draw(st.sampled_from(FORMATS))
    precision = data.draw(st.sampled_from(["exact", "fast"]))
    shape = with_format(Shape(layers=2, shared=9, hidden=70, ffn=36, experts=5, top_k=3), dtype, group)
    model = make(shape, data.draw(st.integers(0, 3)))
    plain, _ = steps(shape, model, precision, None)
    places = np.array(data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=10, max_size=10)), np.int8).reshape(2, 5)
    room = data.draw(st.integers(3, 10))
    made, counts = steps(shape, model, precision, Sharing(room * EXPERT * model[0].expert[2].pages, places, 1))
    assert all(np.array_equal(a, b) for a, b in zip(made, plain, strict=True))
    assert counts["picks_gpu"] + counts["picks_cpu"] == 3 * 2 * 7
    if (places == 1).all():
        assert counts["picks_gpu"] == 0 and "experts_hits" not in counts
    if (places == 0).all():
        assert counts["picks_cpu"] == 0


PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"expert_placement": "cpu"},
    "half": {"expert_placement": {"*.[135]": "cpu"}, "gpu_cache_bytes": 3 * EXPERT},
    "auto": {"expert_placement": "auto", "gpu_cache_bytes": 4 * EXPERT, "pin_after_tokens": 2},
    "async": {"expert_placement": "auto", "gpu_cache_bytes": 4 * EXPERT, "expert_cache_bytes": 6 * EXPERT,
              "engine_mode": "async", "prefetcher": "history", "precision": "fast"},
}  # fmt: skip


@pytest.mark.parametrize("backend", ["sim", "everything", "kernels"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_whole_engine(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, backend: str) -> None:
    """On the simulator, and on a card that works late: tokens and logits of experts that are all on the device."""
    card = None if backend == "sim" else plug_in(monkeypatch, Card(backend))
    precision = PLACEMENTS[name].get("precision", "exact")
    with engine(converted["mixtral"], backend="sim", precision=precision) as plain:
        said, scores = greedy(plain, PROMPT, 12), logits(plain, PROMPT)
        assert plain.counters()["gpu"]["picks_cpu"] == 0
    with engine(converted["mixtral"], backend="sim" if card is None else "cuda", **PLACEMENTS[name]) as made:
        assert greedy(made, PROMPT, 12) == said
        assert np.array_equal(logits(made, PROMPT), scores)
        counts = made.counters()["gpu"]
        assert made.describe()["expert_placement"] == PLACEMENTS[name]["expert_placement"]
    assert counts["picks_cpu"] > 0 and (counts["picks_gpu"] > 0) == (name != "cpu")
    assert card is None or card.clean


def test_auto_follows_heat() -> None:
    """Experts come to the device while there is room; then those that are pinned, and those that take an idle place."""
    shape = Shape(layers=1, experts=4, top_k=1)
    places = np.full((1, 4), placement.PLACES.index("auto"), np.int8)
    backend = CudaBackend(SimDevice(), "exact", Sharing(2 * EXPERT, places, 1))
    Bound(backend, shape, model=make(shape, 4))
    frames = backend.tier
    assert frames is not None

    def use(expert: int, times: int = 1) -> bool:
        """Whether the device computes it."""
        for _ in range(times):
            frames.next_step()
            here, _ = frames.split(0, [expert])
            if here:
                frames.bring(0, here)
                frames.done(0, here)
        return bool(here)

    assert use(0) and use(1) and not use(2) and use(0)
    frames.pin(3, True)
    assert use(3) and list(frames.tier.held) == [0, 3], "pinned: the longest unused leaves"
    assert not use(1, 13) and use(0), "one that was used a moment ago stays"
    assert not use(1, 15) and use(1) and list(frames.tier.held) == [3, 1], "one that sixteen steps did without leaves"
    frames.pin(3, False)
    backend.close()


def test_experts_of_the_processor_take_no_room(converted: dict[str, Path]) -> None:
    with engine(converted["mixtral"], backend="sim", expert_placement={"*": "cpu", "0.0": "gpu"}) as made:
        assert made.describe()["gpu_cache_bytes"] == EXPERT
