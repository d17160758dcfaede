"""Each policy against its definition, written as slowly and plainly as it can be; and their cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from math import log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.config import EVICTION
from colibri_lab.engine.engine import Engine
from colibri_lab.events import Phase
from colibri_lab.pager.frequency import LFRU, LFU
from colibri_lab.pager.policies import POLICIES, make_policy
from colibri_lab.pager.policy import LRU, Policy
from colibri_lab.pager.segments import SLRU
from colibri_lab.pager.stale import LeastStale
from colibri_lab.paths import embedded_model

EXPERTS, LAYERS, CAPACITY = 4, 3, 5
Use = tuple[int, int]  # (when, key)


def lru(uses: list[Use], held: set[int]) -> Callable[[int], Any]:
    return lambda key: max(t for t, k in uses if k == key)


def lfu(uses: list[Use], held: set[int]) -> Callable[[int], Any]:
    return lambda key: (sum(k == key for _, k in uses), max(t for t, k in uses if k == key))


def lfru(uses: list[Use], held: set[int]) -> Callable[[int], Any]:
    layers, here = max(k for _, k in uses) // EXPERTS + 1, uses[-1][1] // EXPERTS

    def worth(key: int) -> float:
        layer = key // EXPERTS
        times = [t for t, k in uses if k // EXPERTS == layer]
        ages = [sum(other > t for other in times) for t, k in uses if k == key]  # in uses of the layer
        return log2(sum(2.0 ** (-age / 7) for age in ages)) - ((layer - here - 1) % layers + 1) / layers

    return worth


def least_stale(uses: list[Use], held: set[int]) -> Callable[[int], Any]:
    def rank(key: int) -> Any:
        layer, here = key // EXPERTS, uses[-1][1] // EXPERTS
        last = max(t for t, k in uses if k == key)
        passes = [t for t, k in uses if k // EXPERTS == layer]  # and when its last pass began
        begin = passes[-1]
        while begin > 1 and uses[begin - 2][1] // EXPERTS == layer:
            begin -= 1
        return last >= begin, (here - layer) % LAYERS, last

    return rank


DEFINED = {"lru": (LRU, lru), "lfu": (LFU, lfu), "lfru": (lambda: LFRU(EXPERTS, 7), lfru)}
DEFINED["least_stale"] = (lambda: LeastStale(EXPERTS), least_stale)


@pytest.mark.parametrize("name", DEFINED)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, EXPERTS * LAYERS - 1), st.sampled_from([1, 1, 3])), max_size=60),
       st.integers(0, 2))  # fmt: skip
def test_the_victim_is_the_one_defined(name: str, asked: list[Use], kept_busy: int) -> None:
    make, defined = DEFINED[name]
    policy: Policy = make()
    uses: list[Use] = []  # those of several rows at once are at the time of the last of them
    held: set[int] = set()
    for key, rows in asked:
        if rows > 1 and name in ("lfu", "lfru"):
            policy.again(key, rows - 1)  # type: ignore[attr-defined]
            uses += [(len(uses) + rows - 1, key)] * (rows - 1)
        if key in held:
            policy.hit(key)
        else:
            if len(held) == CAPACITY:
                busy = {k for _, k in uses[-kept_busy:]} if kept_busy else set()
                rank = defined(uses, held)
                right = min(held - busy, key=rank)
                victim = policy.victim(busy)
                assert victim == right or (name == "lfru" and rank(victim) == pytest.approx(rank(right), abs=1e-9))
                policy.forget(victim)
                held.remove(victim)
            policy.admit(key)
            held.add(key)
        uses.append((len(uses) + 1, key))


def test_slru_keeps_what_was_used_twice() -> None:
    policy = SLRU(share=0.5)
    for key in (0, 1, 2, 3):
        policy.admit(key)
    policy.hit(0)
    policy.hit(1)
    assert policy.victim(()) == 2 and policy.victim({2, 3}) == 0
    policy.hit(2)  # a third of four: the protected one used longest ago steps back
    assert policy.victim({3}) == 0
    policy.forget(2)
    policy.forget(3)
    policy.forget(0)
    assert policy.victim(()) == 1
    with pytest.raises(LookupError):
        policy.victim({1})


@pytest.mark.parametrize("name", POLICIES)
def test_all_busy_is_named(name: str) -> None:
    policy = make_policy(name, 4, 6)
    with pytest.raises(LookupError):
        policy.victim(())
    policy.admit(3)
    with pytest.raises(LookupError, match="in use"):
        policy.victim({3})
    assert policy.victim(()) == 3  # looking changed nothing


@pytest.mark.parametrize("name", POLICIES)
def test_no_linear_search_for_a_victim(name: str) -> None:
    """Four thousand or sixty thousand experts in memory: a miss costs about the same."""

    def cost(held: int) -> float:
        best = 1.0
        for _ in range(3):
            policy = make_policy(name, held // 30, 64)  # some thirty layers
            for key in range(held):
                policy.admit(key)
            begin = time.process_time()
            for key in range(held, held + 2000):
                policy.hit(key - 1)
                policy.forget(policy.victim({key - 1}))
                policy.admit(key)
            best = min(best, time.process_time() - begin)
        return best

    assert cost(60_000) < 6 * cost(4_000) + 0.01


def test_rows_are_told_before_their_experts_are_asked_for() -> None:
    """What a policy hears of a step is one use for each row and expert: a single one by its hit or admission alone."""
    more: dict[int, int] = {}
    admitted: set[int] = set()

    class Telling(LRU):
        def again(self, key: int, uses: int) -> None:
            assert uses > 0 and key not in more and key not in admitted
            more[key] = uses

        def admit(self, key: int) -> None:
            admitted.add(key)
            super().admit(key)

    with Engine.load(embedded_model(), threads=1, eviction_policy=Telling(), expert_cache_bytes="8MiB") as engine:
        cursor = engine.telemetry.cursor()
        list(engine.generate("The young lady", max_tokens=2))
        batch = engine.telemetry.read(cursor)
    prompt = batch.route[batch.tokens["phase"] == Phase.PREFILL]
    experts = int(engine.telemetry.experts)
    uses = Counter((np.arange(prompt.shape[1])[:, None] * experts + prompt).ravel().tolist())
    assert more == {key: n - 1 for key, n in uses.items() if n > 1} and admitted >= set(uses)


def test_config_knows_the_names() -> None:
    assert tuple(POLICIES) == EVICTION
