"""Any budget, batch, chunk, slot size, thread count, ISA and history of freed slots: the same bits."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.engine.engine import Engine
from tests.parity.models import engine, levels

from .conftest import MODELS
from .poison import poisoned

TOKENS = 10
PROMPTS = [
    np.random.default_rng([6, i]).integers(3, 60, length).tolist()
    for i, length in enumerate((1, 2, 7, 8, 9, 17, 31, 40))
]
LOGIT_IDS = PROMPTS[-1]
SAMPLED = {"temperature": 0.9, "top_k": 20, "seed": 1234}
Said = list[tuple[int, float, bytes, bytes]]

budgets = st.floats(0, 1)  # from the least to all
chunks = st.integers(1, 48)
threads = st.integers(1, 2)
slot_sizes = st.sampled_from([1, 2, 5, 16, 256])
batches = st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=8, unique=True)
kinds = st.tuples(st.sampled_from(levels()), st.sampled_from(["fp16", "fp32"]), st.booleans())  # ISA, KV type, greedy
# which of four requests at once, its prompt if it is new, what to do
actions = st.tuples(
    st.integers(0, 3), st.integers(0, 7), st.sampled_from(["next", "drop"])
)  # place, prompt, what to do


def examples(most: int) -> settings:
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def said(token: Any) -> tuple[int, float, bytes, bytes]:
    """All of a token that placement could change."""
    return token.id, token.logprob, token.experts.tobytes(), token.weights.tobytes()


def bits(made: Engine) -> bytes:
    return made.logits(LOGIT_IDS).tobytes()


@cache
def alone(path: Path, precision: str, kv: str, isa: str, greedy: bool) -> tuple[list[Said], bytes]:
    """What each prompt gives with everything in memory, alone, in one chunk, on one thread; and the logits' bits."""
    with engine(path, isa=isa, precision=precision, kv_cache_dtype=kv, threads=1, max_batch_size=1) as made:
        how = {} if greedy else SAMPLED
        return [[said(t) for t in made.generate(p, max_tokens=TOKENS, **how)] for p in PROMPTS], bits(made)


@cache
def least_and_most(path: Path) -> tuple[int, int]:
    with engine(path, threads=1) as made:
        facts = made.describe()
        return facts["top_k"] * facts["expert_bytes"], facts["experts_total_bytes"]


def placed(path: Path, share: float, size: int, batch: int = 8, **how: Any) -> dict[str, Any]:
    """Overrides of an engine whose budget is `share` of the way from the least to all."""
    least, most = least_and_most(path)
    pool = {"kv_cache_slot_size": size, "kv_cache_max_slots": max(512, 4096 // size)}
    return {"expert_cache_bytes": int(least + share * (most - least)), "max_batch_size": batch, **pool, **how}


def together(made: Engine, chosen: list[int], **how: Any) -> dict[int, Said]:
    out: dict[int, Said] = defaultdict(list)
    for i, token in made.generate_batch([PROMPTS[c] for c in chosen], max_tokens=TOKENS, **how):
        out[chosen[i]].append(said(token))
    return out


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_a_token(name: str, precision: str, models: dict[str, Path]) -> None:
    path = models[name]

    @examples(10 if name == "tiny-moe" else 20)
    @given(
        budgets,
        batches,
        chunks,
        threads,
        slot_sizes,
        st.sampled_from(levels()),
        st.sampled_from(["fp16", "fp32"]),
        st.booleans(),
    )
    def check(
        share: float, batch: list[int], chunk: int, many: int, size: int, isa: str, kv: str, greedy: bool
    ) -> None:
        first = levels()[0] if precision == "exact" else isa  # fast mode may differ between ISA levels, and only there
        right, right_bits = alone(path, precision, kv, first, greedy)
        how = placed(path, share, size, prefill_chunk=chunk, threads=many, precision=precision, kv_cache_dtype=kv)
        with poisoned(), engine(path, isa=isa, **how) as made:
            ours = together(made, batch, **({} if greedy else SAMPLED))
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch}
            assert bits(made) == right_bits

    check()


@pytest.mark.parametrize("router", ["int8_lut", "bit_level", "two_stage"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_a_token_with_any_router(name: str, router: str, models: dict[str, Path]) -> None:
    """Approximate or exact, a router looks at a row alone; two_stage says what softmax says, wherever things lie."""
    path = models[name]
    exact, exact_bits = alone(path, "exact", "fp32", levels()[0], True)
    with engine(path, threads=1, max_batch_size=1, router=router) as made:
        right, right_bits = [[said(t) for t in made.generate(p, max_tokens=TOKENS)] for p in PROMPTS], bits(made)
    if router == "two_stage":
        assert (right, right_bits) == (exact, exact_bits)

    @examples(4 if name == "tiny-moe" else 8)
    @given(budgets, batches, chunks, threads, slot_sizes, st.sampled_from(levels()), st.booleans())
    def check(share: float, batch: list[int], chunk: int, many: int, size: int, isa: str, audit: bool) -> None:
        how = placed(path, share, size, prefill_chunk=chunk, threads=many, router=router, router_audit=audit)
        with poisoned(), engine(path, isa=isa, **how) as made:
            ours = together(made, batch)
            assert {i: ours[i] for i in batch} == {i: right[i] for i in batch}
            assert bits(made) == right_bits
            assert (made.counters()["router"]["audited"] > 0) == audit

    check()


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_backend_keeps_it_too(name: str, models: dict[str, Path]) -> None:
    path = models[name]
    with engine(path, backend="reference") as made:
        right = {i: [said(t) for t in made.generate(PROMPTS[i], max_tokens=4)] for i in (2, 5)}
    with poisoned(), engine(path, backend="reference", **placed(path, 0.1, 3, prefill_chunk=3)) as made:
        out: dict[int, Said] = defaultdict(list)
        for i, token in made.generate_batch([PROMPTS[2], PROMPTS[5]], max_tokens=4):
            out[(2, 5)[i]].append(said(token))
    assert out == right


@pytest.mark.parametrize("name", MODELS)
def test_budget_may_change_while_generating(name: str, models: dict[str, Path]) -> None:
    path = models[name]
    least, most = least_and_most(path)
    right, right_bits = alone(path, "exact", "fp32", levels()[0], True)

    @examples(3 if name == "tiny-moe" else 8)
    @given(st.lists(budgets, min_size=TOKENS, max_size=TOKENS), threads)
    def check(shares: list[float], many: int) -> None:
        with poisoned() as filled, engine(path, threads=many, kv_cache_max_slots=512) as made:
            ours, frames = [], set()
            for token, share in zip(made.generate(PROMPTS[5], max_tokens=TOKENS), shares, strict=True):
                ours.append(said(token))
                made.settings.expert_cache_bytes = int(least + share * (most - least))
                frames.add(made.counters()["pager"]["frames"])
            assert ours == right[5] and bits(made) == right_bits
            assert len(frames) > 1 or len(set(shares)) < 3, "the setting must do something"
            made.settings.expert_cache_bytes = least
            assert bits(made) == right_bits and filled["frames"] > 0

    check()


@pytest.mark.parametrize("name", MODELS)
def test_slots_and_seats_are_reused_clean(name: str, models: dict[str, Path]) -> None:
    """Requests that start, pause, run on and are dropped in any order, over a pool that is used again and again."""
    path = models[name]
    right, _ = alone(path, "exact", "fp32", levels()[0], True)

    @examples(5 if name == "tiny-moe" else 12)
    @given(st.lists(actions, min_size=10, max_size=40), slot_sizes, st.integers(1, 20))
    def check(plan: list[tuple[int, int, str]], size: int, chunk: int) -> None:
        how = placed(path, 0.3, size, batch=4, prefill_chunk=chunk)
        with poisoned() as filled, engine(path, **how) as made:
            running: dict[int, tuple[int, Any, Said]] = {}
            for place, prompt, action in plan:
                if place not in running:
                    running[place] = (prompt, made.generate(PROMPTS[prompt], max_tokens=TOKENS), [])
                which, stream, heard = running[place]
                if action == "drop":
                    stream.close()
                    del running[place]
                    continue
                token = next(stream, None)
                if token is None:
                    assert heard == right[which]
                    del running[place]
                else:
                    heard.append(said(token))
                    assert heard == right[which][: len(heard)]
            for which, stream, heard in running.values():
                assert heard + [said(token) for token in stream] == right[which]
            done = made.counters()
            assert done["kv"]["slots_used"] == 0 and (filled["slots"] > 0) == (done["kv"]["slots_peak"] > 0)

    check()


def test_the_check_can_fail(models: dict[str, Path]) -> None:
    """Control: one wrong byte in a frame, and the bits differ."""
    path = models["mixtral"]
    right, right_bits = alone(path, "exact", "fp32", levels()[0], True)
    with engine(path) as made:
        assert bits(made) == right_bits
        made._parts.pager.frames.array[:, 100:140] ^= 0x10
        assert bits(made) != right_bits
    assert right[0] != right[1]
