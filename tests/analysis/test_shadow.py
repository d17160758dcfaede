"""Shadow caches count what a replay of the whole would, and what the engine does at its own setting."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.analysis import shadow as module
from colibri_lab.analysis.shadow import BOUNDS, Shadow
from colibri_lab.analysis.simulate import simulate
from colibri_lab.engine.engine import Engine
from colibri_lab.pager.policies import POLICIES
from colibri_lab.paths import embedded_model


@pytest.fixture(scope="module")
def recorded():
    """(tokens, routes, the pager's counters) of a run of four prompts, two together, at 40 experts under lfu."""
    options = dict(threads=1, eviction_policy="lfu", expert_cache_bytes=40 * 65536, max_batch_size=2)
    with Engine.load(embedded_model(), pin_after_tokens=6, **options) as engine:
        cursor = engine.telemetry.cursor()
        list(engine.generate_batch(["The sea", "12 + 30 =", "KING.", "def area"], max_tokens=30))
        batch = engine.telemetry.read(cursor)
        return batch.tokens, batch.route, engine.counters()["pager"]


@pytest.mark.parametrize("policy", [*POLICIES, *BOUNDS])
def test_rates_are_those_of_a_replay(recorded, policy):
    tokens, route, _ = recorded
    shadow = Shadow(8, 16, 2, pin_after=6, shares=(10, 50, 100))
    shadow.take(tokens, route)
    shadow.work()
    trace = shadow.trace()
    for capacity in (13, 64, 128):
        assert shadow.rate(policy, capacity) == simulate(trace, capacity, policy, pin_after=6).hit_rate


def test_at_the_engine_s_own_setting_the_numbers_are_the_engine_s(recorded):
    tokens, route, pager = recorded
    shadow = Shadow(8, 16, 2, pin_after=6, shares=(50,))
    shadow.now = 40
    shadow.take(tokens, route)
    shadow.work()
    counts = shadow._caches["lfu", 40].counts
    mine = (counts.hits, counts.faults, counts.evictions, counts.pin_hits)
    assert mine == tuple(pager[name] for name in ("hits", "faults", "evictions", "pin_hits"))
    assert (shadow.hits, shadow.faults) == (pager["hits"], pager["faults"]) and counts.pin_hits


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 130), max_size=8), st.data())
def test_pieces_and_little_time_change_nothing(recorded, cuts, data):
    tokens, route, _ = recorded
    tokens, route = tokens[:130], route[:130]
    whole, ours = (Shadow(8, 16, 2, shares=(20, 60)) for _ in range(2))
    whole.take(tokens, route)
    whole.work()
    starts = [i for i in range(1, len(tokens)) if tokens["t_ns"][i - 1] != tokens["t_ns"][i]]
    for first, last in pairwise([0, *sorted(starts[i % len(starts)] for i in cuts), len(tokens)]):
        ours.take(tokens[first:last], route[first:last])
        ours.work(data.draw(st.sampled_from([0.0, 1e-4])), bounds=False)
    ours.work()
    assert ours.curves() == whole.curves() and ours.behind == 0


def test_a_full_window_begins_anew(recorded, monkeypatch):
    tokens, route, _ = recorded
    monkeypatch.setattr(module, "WINDOW", 50 * 8 * 2)
    shadow = Shadow(8, 16, 2, shares=(50,))
    shadow.take(tokens[:40], route[:40])
    shadow.work()
    before = shadow.steps
    shadow.take(tokens[40:70], route[40:70])
    shadow.work()
    assert 0 < sum(len(routes) for routes, _ in shadow._steps) < 50 and shadow.steps != before
    fresh = simulate(shadow.trace(), 64, "lru", pin_after=100).hit_rate
    assert shadow.rate("lru", 64) == fresh


def test_an_empty_window():
    shadow = Shadow(2, 4, 1)
    shadow.take(np.zeros(0, module.TOKEN), np.zeros((0, 2, 1), "u2"))
    shadow.work()
    places, curves = shadow.curves()
    assert places == sorted(set(shadow.capacities)) and all(set(line) == {None} for line in curves.values())
