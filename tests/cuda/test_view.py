"""What boards are told of the GPU: who is on it, what travelled, and what its panel says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.engine.engine import Engine
from colibri_lab.view import blocks
from colibri_lab.view.report import PANELS
from colibri_lab.view.run import RunView
from colibri_lab.view.strips import Window
from colibri_lab.view.systems import SYSTEMS
from tests.parity.models import engine, greedy

PROMPT = [5, 9, 33, 2, 60, 17, 8]
EXPERT = 1 << 16  # bytes of an expert of the models here
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"gpu_cache_bytes": 5 * EXPERT, "expert_cache_bytes": 6 * EXPERT},
    "ahead": {"gpu_cache_bytes": 7 * EXPERT, "prefetcher": "next_gate+history"},
}


def on_device(made: Engine) -> list[int]:
    return sorted(made._parts.backend.tier.keys)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_view_knows_who_is_on_the_gpu(converted: dict[str, Path], name: str) -> None:
    """After every token, from events alone; pages that were sent are the counter's."""
    with engine(converted["mixtral"], backend="sim", telemetry=True, **SETTINGS[name]) as made:
        view = RunView.of(made.telemetry, made.describe())
        for _ in made.generate(PROMPT, max_tokens=8):
            view = RunView.of(made.telemetry, made.describe())
            assert np.flatnonzero(view.experts.device).tolist() == on_device(made)
        counted = made.counters()["gpu"]
        assert view.experts.sent_pages == counted["pages_sent"] > 0
        if name != "all":
            assert counted["experts_evictions"] > 0


def test_a_board_that_connects_late_knows_it_too(converted: dict[str, Path]) -> None:
    with engine(converted["mixtral"], backend="sim", telemetry=True) as made:
        greedy(made, PROMPT, 4)
        view, late = RunView.of(made.telemetry, made.describe()), made.telemetry.cursor()
        view.experts.device[:] = False  # as one that has seen nothing
        view.experts._sent_ns[:] = 0
        made.snapshot()
        view.drain(made.telemetry, late)
        assert np.flatnonzero(view.experts.device).tolist() == on_device(made)
        mark = blocks.experts(view)[1]["mark"]
        bits = np.unpackbits(mark, axis=1, bitorder="little")
        assert mark.shape[0] == 3 and np.flatnonzero(bits[2]).tolist() == on_device(made)


def test_the_panel_says_what_the_counters_say(converted: dict[str, Path]) -> None:
    which = next(i for i, system in enumerate(SYSTEMS) if system.name == "gpu")
    system = SYSTEMS[which]
    with engine(converted["mixtral"], backend="sim", telemetry=True) as made:
        for _ in range(3):
            greedy(made, PROMPT, 6)
        view = RunView.of(made.telemetry, made.describe())
        asked = {name for part in (*system.lines, *system.facts) for name in (*part.of, *part.over)}
        assert asked - {"seconds"} <= set(view.gauges.names)
        window, counters = Window(view.gauges), made.counters()
        assert window.on[which] and "<svg" in PANELS["gpu"](view)
        for fact, (told, *_) in zip(system.facts, window.facts(which), strict=True):
            names = [name.split(".") for name in fact.of]
            assert told == pytest.approx(sum(counters[group][name] for group, name in names)), fact.label
