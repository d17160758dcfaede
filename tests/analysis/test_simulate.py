"""The simulator counts what the engine counts; Belady is the best of all."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.analysis.accesses import Accesses
from colibri_lab.analysis.belady import belady
from colibri_lab.analysis.simulate import miss_ratios, simulate
from colibri_lab.pager.policies import POLICIES

from .runs import record


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("experts", "batch", "chunk"), [(24, 1, 64), (64, 1, 1), (64, 4, 7), (2, 2, 3), (128, 8, 64)])
def test_the_simulator_reproduces_the_engine_s_counters(policy: str, experts: int, batch: int, chunk: int) -> None:
    trace, pager, _ = record(policy, experts, tokens=25, max_batch_size=batch, prefill_chunk=chunk)
    counts = simulate(trace, experts, policy)
    assert (counts.hits, counts.faults, counts.evictions) == (pager["hits"], pager["faults"], pager["evictions"])


@pytest.mark.parametrize("policy", POLICIES)
def test_with_pins_too(policy: str) -> None:
    trace, pager, _ = record(policy, 48, tokens=60, max_batch_size=2, pin_after_tokens=4, pin_max_share=0.4)
    counts = simulate(trace, 48, policy, pin_after=4, pin_share=0.4)
    mine = (counts.hits, counts.faults, counts.evictions, counts.pin_hits)
    assert mine == (pager["hits"], pager["faults"], pager["evictions"], pager["pin_hits"])
    assert counts.pin_hits > 0 and simulate(trace, 48, policy).pin_hits == 0


def test_policies_differ_and_tokens_do_not() -> None:
    runs = {name: record(name, 40, max_batch_size=1) for name in POLICIES}
    assert len({tuple(said) for _, _, said in runs.values()}) == 1
    faults = {name: pager["faults"] for name, (_, pager, _) in runs.items()}
    assert len(set(faults.values())) == len(POLICIES), faults
    trace = runs["lru"][0]
    assert {name: simulate(trace, 40, name).faults for name in POLICIES} == faults
    assert simulate(trace, 40, "belady").faults <= simulate(trace, 40, "belady_forced").faults < min(faults.values())


def test_miss_ratio_curves() -> None:
    trace, _, _ = record("lru", 64, tokens=25)
    curves = miss_ratios(trace, (8, 32, 64, 128), [*POLICIES, "belady", "belady_forced"])
    for name, curve in curves.items():
        assert curve[-1] == pytest.approx(trace.keys / trace.references), name  # only first uses
        assert curve[0] > curve[-1]
    for low, high in (("belady", "belady_forced"), ("belady_forced", "lru")):
        assert all(a <= b for a, b in zip(curves[low], curves[high], strict=True))
    lru, best = curves["lru"], curves["belady_forced"]
    assert lru == sorted(lru, reverse=True) and best == sorted(best, reverse=True)  # a larger cache is never worse


waves = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=2, unique=True), max_size=9)


@settings(max_examples=150, deadline=None)
@given(waves, st.integers(2, 4))
def test_belady_is_the_best_by_trying_everything(asked: list[list[int]], capacity: int) -> None:
    def best(forced: bool) -> int:
        reached = {frozenset(): 0}  # what is in memory -> fewest faults
        for wave in asked:
            after: dict[frozenset[int], int] = {}
            for held, faults in reached.items():
                cost = faults + len(set(wave) - held)
                must = set(wave) if forced else set()
                free = (held | set(wave)) - must
                for n in range(min(capacity - len(must), len(free)) + 1):
                    for kept in combinations(sorted(free), n):
                        state = frozenset(kept) | must
                        after[state] = min(after.get(state, 1 << 30), cost)
            reached = after
        return min(reached.values())

    for forced in (True, False):
        hits, faults, evictions = belady(asked, capacity, forced)
        assert faults == best(forced) and hits == sum(map(len, asked)) - faults
        assert 0 <= faults - evictions <= faults


def test_dense_layers_and_empty_recordings() -> None:
    from colibri_lab.analysis.accesses import accesses
    from colibri_lab.events import NO_EXPERT, TOKEN

    tokens = np.zeros(3, TOKEN)
    tokens["t_ns"] = 5, 5, 9
    route = np.array([[[1, 0], [NO_EXPERT] * 2], [[1, 2], [NO_EXPERT] * 2], [[3, 1], [NO_EXPERT] * 2]], np.uint16)
    trace = accesses(tokens, route, 4)
    assert trace.steps == [[(0, [[1, 0], [1, 2]])], [(0, [[3, 1]])]]
    assert (trace.references, trace.keys) == (5, 4)
    assert accesses(tokens[:0], route[:0], 4).references == 0
    assert simulate(Accesses(4, 2, []), 3).hit_rate == 0


def test_recorded_by_a_telemetry_or_a_file(tmp_path: Path) -> None:
    from colibri_lab.analysis.accesses import recorded
    from colibri_lab.engine.engine import Engine
    from colibri_lab.paths import embedded_model
    from colibri_lab.telemetry import Recorder, Telemetry, replay

    with Engine.load(embedded_model(), threads=1, expert_cache_bytes="2MiB") as engine:
        with Recorder(engine.telemetry, tmp_path / "trace.jsonl"):
            list(engine.generate("The sea", max_tokens=30))
        trace = recorded(engine)
        pager = engine.counters()["pager"]
    counts = simulate(trace, 32, "lfru")
    assert (counts.hits, counts.faults) == (pager["hits"], pager["faults"])
    assert recorded(replay(tmp_path / "trace.jsonl")).steps == trace.steps
    small = Telemetry(1, 4, 1, capacity=4)
    route = np.zeros((1, 1, 1), np.uint16)
    for t in range(6):
        small.step(t, [1], [t], [0], 1, *[0] * 11, route, route.astype("f2"), np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="gaps"):
        recorded(small)


def test_faults_are_told_step_by_step() -> None:
    trace, pager, _ = record("lfru", 40, tokens=30, max_batch_size=1)
    counts = simulate(trace, 40, "lfru")
    assert len(counts.by_step) == len(trace.steps) and sum(counts.by_step) == pager["faults"] > 0
    assert counts.by_step[0] > 0, "the first step finds nothing in memory"
    assert counts == simulate(trace, 40, "lfru") and simulate(trace, 40, "belady").by_step == ()
