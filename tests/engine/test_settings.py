"""Live settings, and a counter for every setting that is accepted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from colibri_lab import Config
from colibri_lab.engine import Engine
from colibri_lab.errors import ConfigError, EngineClosed

from .conftest import Load


def test_the_budget_acts_at_the_next_token(load: Load) -> None:
    engine = load()
    tokens = engine.generate("The captain", max_tokens=100)
    next(tokens)
    engine.settings.expert_cache_bytes = "256KiB"
    assert engine.settings.expert_cache_bytes == 262144
    next(tokens)
    pager = engine.counters()["pager"]
    assert pager["frames"] == 4 and pager["frames_used"] <= 4 and pager["evictions"] > 0
    engine.settings.expert_cache_bytes = "4MiB"  # nobody steps now: acts at once
    assert engine.counters()["pager"]["frames"] == 64
    faults = engine.counters()["pager"]["faults"]
    list(tokens)
    assert engine.counters()["pager"]["experts_resident"] > 4 and engine.counters()["pager"]["faults"] > faults


def test_a_budget_written_while_the_last_token_is_made_is_in_force_after_it(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    commit = engine._stepper._commit

    def write_first(*step: Any) -> None:
        writer = threading.Thread(target=engine.settings.set, kwargs={"expert_cache_bytes": "1MiB"})
        writer.start()
        writer.join()
        assert engine.counters()["pager"]["frames"] == 128, "never inside a step"
        commit(*step)

    monkeypatch.setattr(engine._stepper, "_commit", write_first)
    list(engine.generate("A", max_tokens=1))
    assert engine.counters()["pager"]["frames"] == 16


def test_no_budget_is_the_default_budget_while_running_too(load: Load) -> None:
    engine = load(expert_cache_bytes="256KiB")
    engine.settings.expert_cache_bytes = 10**15
    assert engine.telemetry.facts["settings"] == {"expert_cache_bytes": 8 << 20}, "what is in force: all experts"
    engine.settings.expert_cache_bytes = "256KiB"
    engine.settings.expert_cache_bytes = None
    assert engine.counters()["pager"]["frames"] == 128 and engine.settings.expert_cache_bytes is None


def test_wrong_writes_change_nothing(load: Load) -> None:
    engine = load(max_batch_size=4)
    before = engine.settings.as_dict()
    for name, value, says in [
        ("expert_cache_bytes", "64KiB", "the least is 0.125 MiB"),
        ("expert_cache_bytes", "lots", "512MiB"),
        ("max_batch_size", 5, "at most 4, its value at load"),
        ("threads", 2, "fixed when the model is loaded"),
        ("pace", -1, "pace"),
        ("paces", 1, "did you mean pace"),
    ]:
        with pytest.raises(ConfigError, match=says):
            setattr(engine.settings, name, value)
    with pytest.raises(ConfigError):
        engine.settings.set(pace=3, prefill_chunk=0)
    assert engine.settings.as_dict() == before
    with pytest.raises(AttributeError, match="did you mean pace"):
        engine.settings.paces  # noqa: B018


def test_a_closed_engine_takes_no_settings(load: Load) -> None:
    engine = load()
    engine.close()
    before = engine.settings.as_dict()
    with pytest.raises(EngineClosed, match="settings: pace, prefill_chunk: the engine is closed; load it anew"):
        engine.settings.set(pace=3, prefill_chunk=1)
    with pytest.raises(EngineClosed, match="settings: prefetcher"):
        engine.settings.prefetcher = "history"
    assert engine.settings.as_dict() == before


def test_pace(load: Load) -> None:
    engine = load(pace=2)
    begin = time.monotonic()
    list(engine.generate("A", max_tokens=5))
    assert time.monotonic() - begin > 1.5
    engine.settings.pace = None
    begin = time.monotonic()
    list(engine.generate("A", max_tokens=5))
    assert time.monotonic() - begin < 1.5, "some milliseconds"


def test_a_new_pace_ends_the_wait_of_the_old_one(load: Load) -> None:
    engine = load(pace=0.01)
    tokens = engine.generate("A", max_tokens=3)
    next(tokens)
    change = threading.Timer(0.1, engine.settings.set, kwargs={"pace": 100})
    change.start()
    begin = time.monotonic()
    list(tokens)
    assert 0.05 < time.monotonic() - begin < 50, "the old pace gives a token each 100 s"


def test_chunk_and_batch_show_in_the_steps(load: Load) -> None:
    engine = load(prefill_chunk=50, max_batch_size=4)
    steps = lambda: engine.counters()["engine"]["steps"]  # noqa: E731
    list(engine.generate([5] * 100, max_tokens=1))
    assert steps() == 2
    engine.settings.prefill_chunk = 10
    list(engine.generate([5] * 100, max_tokens=1))
    assert steps() == 12
    list(engine.generate_batch([[1], [2], [3], [4]], max_tokens=5))
    assert steps() == 17
    engine.settings.max_batch_size = 1
    list(engine.generate_batch([[1], [2], [3], [4]], max_tokens=5))
    assert steps() == 37


def test_every_setting_shows(load: Load) -> None:
    plain = load()
    list(plain.generate("The sea", max_tokens=5))
    other = load(
        backend="reference", precision="exact", kv_cache_dtype="fp32", kv_cache_slot_size=2, kv_cache_max_slots=300,
        telemetry=False, expert_cache_bytes="2MiB",
    )  # fmt: skip
    list(other.generate("The sea", max_tokens=5))
    p, o = plain.describe(), other.describe()
    assert o["backend"] == "reference" and "by name" in o["why_backend"] and o["precision"] == "exact" != p["precision"]
    assert o["kv_dtype"] == "fp32" != p["kv_dtype"] and o["expert_cache_bytes"] == 2 << 20 and o["frames"] == 32
    assert other._parts.kv.pool.k.itemsize == 4
    c, d = plain.counters(), other.counters()
    assert d["kv"]["slots"] == 300 and d["kv"]["slot_size"] == 2 and d["kv"]["slots_peak"] > c["kv"]["slots_peak"]
    assert c["telemetry"]["events"] > 0 == d["telemetry"]["events"]
    assert c["router"]["selections"] * 2 == c["dispatch"]["rows"]
    assert load(threads=2).describe()["threads"] == 2


def test_the_least_budget_is_named_at_load(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"expert_cache_bytes: 0\.0625 MiB is too little .* the least is 0\.125 MiB"):
        Engine.load(model, expert_cache_bytes="64KiB")


def test_ways_to_load(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model_path: {model}\nthreads: 1\nexpert_cache_bytes: 1MiB\n")
    for source, settings in [
        (file, {}),
        (Config.from_yaml(file), {"prefill_chunk": 9}),
        (model / "model.colibri", {"threads": 1}),
    ]:
        with Engine.load(source, **settings) as engine:
            assert engine.settings.prefill_chunk == settings.get("prefill_chunk", 64)
            assert next(engine.generate("The sea")).id
    (tmp_path / "odd.yaml").symlink_to(model)
    with Engine.load(tmp_path / "odd.yaml", threads=1, tokenizer_path=model / "tokenizer.json") as engine:
        assert engine.tokenizer.kind == "tokenizers"
    for wrong in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match=f"tokenizer_path: {wrong}: no tokenizer"):
            Engine.load(model, tokenizer_path=wrong)
    with pytest.raises(ConfigError, match="no such model"):
        Engine.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"neither model\.colibri nor config\.json"):
        Engine.load(tmp_path)
    with pytest.raises(ConfigError, match="converted with int4, not fp16"):
        Engine.load(model, quantize="fp16")
    with pytest.raises(ConfigError, match="names no model"):
        Engine.load(Config())


def test_a_hugging_face_folder_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colibri_lab.paths import embedded_model

    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path))
    with Engine.load(embedded_model(), quantize="int8", threads=1) as engine:
        assert engine.describe()["quantize"] == "int8"
        first = "".join(t.text for t in engine.generate("The sea", max_tokens=5))
    made = list(tmp_path.rglob("model.colibri"))
    stamp = made[0].stat().st_mtime_ns
    with Engine.load(embedded_model(), quantize="int8", threads=1) as engine:
        assert "".join(t.text for t in engine.generate("The sea", max_tokens=5)) == first
    assert len(made) == 1 and made[0].stat().st_mtime_ns == stamp


def test_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colibri_lab import Recorder, report
    from colibri_lab.paths import embedded_model
    from colibri_lab.telemetry import replay

    odd = os.fsencode(tmp_path) + b"/m\xff\xc3\xa9 x"
    shutil.copytree(os.fsencode(embedded_model()), odd)
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    with Engine.load(os.fsdecode(odd), threads=1) as engine:
        recorder = Recorder(engine.telemetry, tmp_path / "t.jsonl")
        assert list(engine.generate("The sea", max_tokens=2))
        assert engine.describe()["model"] == "m?é x"
        report(engine, tmp_path / "r.html")
        assert replay(recorder.close()).engine["model"] == "m?é x"
