"""KV persistence in a running engine: prefixes really come back, and no token ever changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab import performance
from colibri_lab.engine.engine import Engine
from colibri_lab.kv import persist_folder
from colibri_lab.kv.persist_folder import LEAST
from tests.placement.poison import poisoned

from .stored import indexes, load, prompt, said, store, taken, tiny, tokens_of

PROMPT = prompt(1, 60)


def test_a_prefix_survives_its_process(model: Path, tmp_path: Path, alone: Any) -> None:
    first = store(model, tmp_path, PROMPT)
    assert first["prefixes_stored"] == 1 and first["prefixes_restored"] == 0
    assert tokens_of(indexes(tmp_path)[0]) == PROMPT, "the end is less than LEAST tokens longer"
    with load(model, tmp_path) as engine:
        assert said(engine, PROMPT) == alone(PROMPT)
        kv, done = engine.counters()["persistence"], engine.counters()["engine"]
        assert kv["prefixes_restored"] == 1 and kv["tokens_restored"] == len(PROMPT) - 1
        assert done["prefill_tokens"] == 1, "only the last token of the prompt was computed"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_nothing_changes_a_token(model: Path, tmp_path_factory: Any, alone: Any, dtype: str, backend: str) -> None:
    """Beginnings of one text, whole or cut, alone or together, over and over on one folder, with NaN in free slots."""
    texts = [PROMPT[:n] for n in (15, 16, 17, 40, 41, 60)] + [PROMPT[:30] + prompt(2, 20), prompt(3, 25)]
    few = backend == "reference"

    @settings(max_examples=4 if few else 25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=4),
        st.sampled_from([8, 16, 24]),
        st.integers(1, 40),
        st.integers(2, 30),
        st.booleans(),
        st.sampled_from(["sync"] if few else ["sync", "async"]),
    )
    def check(rounds: list[list[int]], size: int, chunk: int, tokens: int, greedy: bool, mode: str) -> None:
        folder = tmp_path_factory.mktemp("prefixes")
        how = {} if greedy else {"temperature": 0.9, "seed": 7}
        tokens = min(tokens, 3) if few else tokens
        with poisoned():
            for batch in rounds:
                config = {"kv_cache_slot_size": size, "prefill_chunk": chunk, "kv_cache_dtype": dtype}
                with load(model, folder, backend=backend, engine_mode=mode, **config) as engine:
                    together: dict[int, list[Any]] = {i: [] for i in range(len(batch))}
                    for i, t in engine.generate_batch([texts[b] for b in batch], max_tokens=tokens, **how):
                        together[i].append((t.id, t.logprob, t.weights.tobytes()))
                    for i, b in enumerate(batch):
                        assert together[i] == alone(texts[b], tokens, dtype, backend, **how)
                    assert engine.counters()["kv"]["slots_used"] == 0
                    assert engine.counters()["persistence"]["slots_spilled"] == 0
                    assert not engine.describe()["kv_persistence"]["refused"]

    check()


def test_expert_local_attention_comes_back_too(tmp_path: Path) -> None:
    """What it sees depends on each token's first expert, and that is stored."""
    model, text, how = tiny(tmp_path, max_position_embeddings=512), prompt(7, 400), {"attention": "expert_local"}
    with load(model, None, **how) as engine:
        right = said(engine, text, 20)
        seen = engine.counters()["kv"]
        assert seen["attention_tokens"] < seen["attention_tokens_exact"]
    store(model, tmp_path / "prefixes", text[:350], **how)
    for restored in (350, 399):
        with load(model, tmp_path / "prefixes", **how) as engine:
            assert said(engine, text, 20) == right
            assert engine.counters()["persistence"]["tokens_restored"] == restored
    assert store(model, tmp_path / "prefixes", text)["tokens_restored"] == 0, "exact attention has other keys"


def test_a_conversation_grows_one_file(model: Path, tmp_path: Path, alone: Any) -> None:
    ids = list(PROMPT)
    for turn in range(3):
        with load(model, tmp_path) as engine:
            heard = said(engine, ids, 20)
            assert heard == alone(ids, 20)
            kv = engine.counters()["persistence"]
            assert kv["tokens_restored"] == (len(ids) - 21 if turn else 0), "all that the turn before computed"
        assert len(indexes(tmp_path)) == 1
        ids += [token for token, *_ in heard] + prompt(turn, 20)
    assert len(tokens_of(indexes(tmp_path)[0])) == len(ids) - 21


def test_a_cancelled_and_an_unfinished_request_are_stored(model: Path, tmp_path: Path) -> None:
    with load(model, tmp_path) as engine:
        stream = engine.generate(PROMPT, max_tokens=50)
        [next(stream) for _ in range(30)]
        stream.close()
        other = engine.generate(prompt(4, 50), max_tokens=50)
        next(other)
    assert sorted(len(tokens_of(index)) for index in indexes(tmp_path)) == [50, 89]


def test_slots_are_too_few_to_restore(model: Path, tmp_path: Path, alone: Any) -> None:
    store(model, tmp_path, PROMPT)
    with load(model, tmp_path, kv_cache_max_slots=48) as engine:
        stream = engine.generate(prompt(5, 60), max_tokens=40)
        next(stream)
        rest = engine.counters()["kv"]["slots"] - engine.counters()["kv"]["slots_used"]
        assert 0 < rest < 22, "the test wants some slots left, and too few"
        with pytest.raises(ValueError, match="no KV slot left"):
            said(engine, PROMPT, 1)
        assert engine.counters()["persistence"]["no_room_to_restore"] == 1
        stream.close()
        assert said(engine, PROMPT) == alone(PROMPT)
        assert engine.counters()["persistence"]["prefixes_restored"] == 1


def test_equal_hashes_are_told_apart_by_tokens(
    model: Path, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist_folder, "start_key", lambda ids: 0)
    texts = [prompt(seed, 40) for seed in range(6)]
    for text in texts[:3]:
        store(model, tmp_path, text)
    with load(model, tmp_path) as engine:
        assert [said(engine, text) for text in texts] == [alone(text) for text in texts]
        assert engine.counters()["persistence"]["tokens_restored"] == 3 * 39


def test_short_prompts_are_not_worth_a_file(model: Path, tmp_path: Path) -> None:
    kv = store(model, tmp_path, PROMPT[: LEAST - 1], tokens=1)
    assert kv["prefixes_stored"] == 0 and not list(tmp_path.iterdir())


def test_the_quota_holds_and_the_oldest_goes(model: Path, tmp_path: Path, alone: Any) -> None:
    texts = [prompt(seed, 60) for seed in range(5)]
    store(model, tmp_path, texts[0], tokens=1)
    quota = int(taken(tmp_path) * 3.5)
    for text in texts[1:3]:
        store(model, tmp_path, text, tokens=1, kv_cache_quota_bytes=quota)
    with load(model, tmp_path, kv_cache_quota_bytes=quota) as engine:
        said(engine, texts[0], 1)  # used: now the second is the oldest
        for token in engine.generate(texts[3], max_tokens=1):
            assert token.index == 0
        assert taken(tmp_path) <= quota
    assert engine.counters()["persistence"]["prefixes_evicted"] == 1
    assert {tuple(tokens_of(i)) for i in indexes(tmp_path)} == {tuple(texts[i]) for i in (0, 2, 3)}
    with load(model, tmp_path, kv_cache_quota_bytes=4096) as engine:  # nothing has room: nothing is stored or spilled
        assert said(engine, texts[4], 40) == alone(texts[4], 40)
        kv = engine.counters()["persistence"]
        assert kv["quota_reached"] > 0 == kv["bytes_spilled"] and kv["stopped"] == 0
    assert taken(tmp_path) <= 4096


def test_what_is_in_use_is_not_evicted(model: Path, tmp_path: Path, alone: Any) -> None:
    store(model, tmp_path, PROMPT, tokens=1)
    quota = int(taken(tmp_path) * 1.5)
    with load(model, tmp_path, kv_cache_quota_bytes=quota) as engine:
        stream = engine.generate(PROMPT, max_tokens=12)
        heard = [next(stream)]
        said(engine, prompt(6, 60), 1)
        assert len(indexes(tmp_path)) == 1 and engine.counters()["persistence"]["quota_reached"] > 0
        heard += list(stream)
        assert [(t.id, t.logprob, t.weights.tobytes()) for t in heard] == alone(PROMPT)


def test_a_forked_child_leaves_the_files_alone(model: Path, tmp_path: Path) -> None:
    import os
    import warnings

    with load(model, tmp_path) as engine:
        said(engine, PROMPT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; it is the point
            child = os.fork()
        if child == 0:
            right = said(engine, prompt(8, 60), 20) and engine.counters()["persistence"]["bytes_written"]
            engine.close()
            os._exit(0 if right == engine.counters()["persistence"]["bytes_written"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(indexes(tmp_path)) == 1


def test_it_is_seen(model: Path, tmp_path: Path) -> None:
    """In the engine's table and in the command line's facts."""
    store(model, tmp_path, PROMPT)
    with load(model, tmp_path) as engine:
        said(engine, PROMPT)
        shown = engine._repr_html_()
        assert "59 tokens restored" in shown and str(tmp_path) in shown
        facts = dict(performance.facts(engine.describe(), engine.settings))
        assert facts["kv"].endswith(f", 1 prefixes in {tmp_path}")


def test_off_means_off(model: Path) -> None:
    with load(model, None) as engine:
        said(engine, PROMPT)
        assert engine.counters()["persistence"] == {} and engine.describe()["kv_persistence"] == {"state": "off"}
        assert isinstance(engine, Engine)
