"""Attention over slots through the whole engine: the bits of a contiguous cache, whatever the pool went through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.engine import loading
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError, SlotsExhausted
from colibri_lab.kv.cache import KVCache
from tests.parity.models import engine, levels
from tests.placement.poison import poisoned

MODELS = ("plain", "mixed")
MODES = ("exact", "expert_local")
NEAR = {"RECENT": 24, "SINKS": 3}  # small enough for prompts of a few hundred tokens
PROMPTS = [np.random.default_rng([8, i]).integers(3, 60, n).tolist() for i, n in enumerate((1, 40, 130, 333, 420))]
TOKENS = 6
Said = list[tuple[int, float]]


class Contiguous(KVCache):
    """The oracle: position p of a seat and layer lies at the p-th place of its own stretch of the pool."""

    rows: Any  # the step's rows, set once the engine is there

    def place(self, layer: int, first: Any, at: int = 0) -> list[int]:
        positions, many = self.pool.where.shape[2], len(self._seats)
        self._dst[:many] = [(seat * self.layers + layer) * positions for seat in self._seats]
        self._dst[:many] += self.rows.position[:many]
        self._placed.append([0] * many)
        return self._dst[:many].tolist()  # type: ignore[no-any-return]


@contextmanager
def near(mode: str, **how: Any) -> Iterator[Any]:
    """What loads an engine that sees few tokens as near in expert-local mode."""
    with pytest.MonkeyPatch.context() as patch:
        if mode == "expert_local":
            for name, value in NEAR.items():
                patch.setattr(loading, name, value)
            how["prefill_chunk"] = min(how.get("prefill_chunk", 24), NEAR["RECENT"])
        yield patch, {"attention": mode, "threads": 1, **how}


def said(made: Engine, prompt: list[int]) -> Said:
    return [(token.id, token.logprob) for token in made.generate(prompt, max_tokens=TOKENS)]


_KEPT: dict[Any, tuple[list[Said], list[bytes]]] = {}


def contiguous(path: Path, mode: str, kv_dtype: str) -> tuple[list[Said], list[bytes]]:
    """What each prompt gives alone in a contiguous cache, token by token and as logits."""
    key = path, mode, kv_dtype
    if key not in _KEPT:
        how = {"kv_cache_dtype": kv_dtype, "max_batch_size": 1, "kv_cache_slot_size": 2048, "kv_cache_max_slots": 8}
        with near(mode, **how) as (patch, overrides):
            patch.setattr(loading, "KVCache", Contiguous)
            with engine(path, **overrides) as made:
                made._parts.kv.rows = made._parts.rows
                assert isinstance(made._parts.kv, Contiguous)
                _KEPT[key] = [said(made, p) for p in PROMPTS], [made.logits(p).tobytes() for p in PROMPTS[1:]]
    return _KEPT[key]


sizes = st.one_of(st.sampled_from([64, 65, 127, 256, 333, 1023, 1024]), st.integers(64, 1024), st.integers(1, 9))
# what was there before: a prompt, how many tokens of it were fetched, whether it was dropped or read to its end
before = st.lists(st.tuples(st.integers(0, 4), st.integers(0, TOKENS), st.booleans()), max_size=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_any_slot_size_and_history_is_contiguous(name: str, mode: str, models: dict[str, Path]) -> None:
    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(sizes, st.integers(1, 64), st.sampled_from(["fp16", "fp32"]), st.sampled_from(levels()), before, st.data())
    def check(size: int, chunk: int, dtype: str, isa: str, past: Any, data: st.DataObject) -> None:
        right, right_bits = contiguous(models[name], mode, dtype)
        runs = {"engine_mode": data.draw(st.sampled_from(["sync", "async"])), "threads": data.draw(st.integers(1, 2))}
        slots = max(400, 4 * 4 * 5 * 430 // size)
        runs |= {"prefill_chunk": chunk, "kv_cache_dtype": dtype, "max_batch_size": 3}
        with near(mode, **runs) as (_, how), poisoned() as filled:
            with engine(models[name], isa=isa, kv_cache_slot_size=size, kv_cache_max_slots=slots, **how) as made:
                open_ = []
                for prompt, tokens, dropped in past:
                    stream = made.generate(PROMPTS[prompt], max_tokens=TOKENS)
                    heard = [next(stream) for _ in range(tokens)]
                    assert [(t.id, t.logprob) for t in heard] == right[prompt][:tokens]
                    if dropped:
                        stream.close()
                    else:
                        open_.append(stream)
                chosen = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
                got: list[Said] = [[] for _ in chosen]
                for i, token in made.generate_batch([PROMPTS[c] for c in chosen], max_tokens=TOKENS):
                    got[i].append((token.id, token.logprob))
                assert got == [right[c] for c in chosen]
                at = data.draw(st.integers(1, 4))
                assert made.logits(PROMPTS[at]).tobytes() == right_bits[at - 1]
                for stream in open_:
                    stream.close()
                assert made.counters()["kv"]["slots_used"] == 0 and filled["slots"] > 0

    check()


def test_history_really_moves_entries(models: dict[str, Path]) -> None:
    """Control for the test above: base slots, double slots and exchanged places all occur in it."""
    with engine(models["plain"], kv_cache_slot_size=5, kv_cache_max_slots=4000, threads=1) as made:
        stream = made.generate(PROMPTS[4], max_tokens=2)
        next(stream)
        counters = made.counters()["kv"]
        assert counters["base_slots"] > 0 and counters["double_slots"] > 0
        assert counters["promotions"] > 0 and counters["entries_moved"] >= counters["promotions"]
        stream.close()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_expert_local_reads_less_and_says_so(backend: str, models: dict[str, Path]) -> None:
    counted = {}
    for mode in MODES:
        with near(mode) as (_, how), engine(models["plain"], backend=backend, **how) as made:
            logits = made.logits(PROMPTS[2])
            counted[mode] = made.counters()["kv"], logits, made.describe()
            assert ("of what exact attention reads" in made._repr_html_()) == (mode == "expert_local")
    (exact, right, plain), (local, other, facts) = counted["exact"], counted["expert_local"]
    tokens = len(PROMPTS[2])
    assert exact["attention_tokens"] == exact["attention_tokens_exact"] == 2 * tokens * (tokens + 1) / 2
    assert exact["attention_guessed"] == 0 and plain["changes"] == [] and plain["attention"] == "exact"
    assert local["attention_tokens_exact"] == exact["attention_tokens"] > 1.5 * local["attention_tokens"]
    assert local["attention_bytes"] == local["attention_tokens"] * 2 * 2 * 8 * 4  # K and V, heads, head_dim, fp32
    assert local["attention_guessed"] == 2 * (tokens - 27) > local["attention_recalled"] > tokens / 4
    assert np.array_equal(right[:27], other[:27]) and not np.array_equal(right[27:], other[27:])
    assert any("attention: expert_local is approximate" in change for change in facts["changes"])
    assert (facts["attention_recent"], facts["attention_sinks"]) == (24, 3)


def test_long_chunks_are_refused_with_expert_local(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"prefill_chunk: 257 is more than the 256 tokens .* choose at most 256"):
        Engine.load(models["plain"], attention="expert_local", prefill_chunk=257)


@pytest.mark.parametrize("mode", MODES)
def test_without_slots_a_request_ends_and_the_others_never_notice(mode: str, models: dict[str, Path]) -> None:
    """Random requests over tiny pools: who ends well has the bits it has alone, who fails says why, and all is free."""
    ended = {"well": 0, "without": 0, "dropped": 0}
    request = st.tuples(st.integers(0, 3), st.integers(1, TOKENS), st.integers(0, 30))

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(request, min_size=2, max_size=9), st.integers(1, 4), st.integers(1, 40), st.integers(30, 90),
           st.integers(1, 20), st.randoms(use_true_random=False))  # fmt: skip
    def check(asked: Any, batch: int, chunk: int, slots: int, size: int, dice: Any) -> None:
        right, _ = contiguous(models["plain"], mode, "fp32")
        how = {"prefill_chunk": chunk, "max_batch_size": batch, "kv_cache_max_slots": slots, "kv_cache_slot_size": size}
        with near(mode, **how) as (_, overrides), poisoned(), engine(models["plain"], **overrides) as made:
            live = [
                (made.generate(PROMPTS[prompt], max_tokens=tokens), right[prompt][:tokens], drop, Said())
                for prompt, tokens, drop in asked
            ]
            while live:
                stream, good, drop, heard = entry = dice.choice(live)
                try:
                    token = next(stream, None) if drop else stream.close()  # one in thirty walks away at once
                except SlotsExhausted as error:
                    assert f"all {slots} slots of {size} tokens are in use" in str(error)
                    assert "by this request; raise kv_cache_max_slots" in str(error)
                    ended["without"] += 1
                    live.remove(entry)
                    continue
                if token is None:
                    assert heard == good or not drop
                    ended["well" if drop else "dropped"] += 1
                    live.remove(entry)
                    continue
                heard.append((token.id, token.logprob))
                assert heard == good[: len(heard)]
            kv, counters = made._parts.kv, made.counters()["kv"]
            assert counters["slots_used"] == counters["tokens"] == counters["base_slots"] == 0
            assert sorted(kv.slots._free) == list(range(slots)) and len(kv._free_seats) == batch + 1
            assert not any(kv._tables) and not any(kv.slots.valid)
            assert said(made, PROMPTS[0]) == right[0]

    check()
    assert all(ended.values()), ended
