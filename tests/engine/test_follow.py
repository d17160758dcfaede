"""Following one token: what is copied is what the engine computed with, in every mode, and nobody else is touched."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.engine import Engine
from colibri_lab.errors import RequestError
from colibri_lab.model.store import ModelFile
from tests.makers import make

from .conftest import Load

PROMPT = "The captain looked at the sea and"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backend": "reference"},
        {"prefill_chunk": 3, "kv_cache_slot_size": 16},
        {"expert_cache_bytes": "256KiB", "router": "two_stage"},
        {"engine_mode": "async", "dispatch_ring_size": 4, "expert_cache_bytes": "1MiB"},
    ],
    ids=str,
)
def test_every_station_belongs_to_the_same_token(load: Load, model: Path, settings: dict[str, object]) -> None:
    engine = load(**settings)
    ids = engine.tokenizer.encode(PROMPT)
    *_, said = engine.generate(ids[:-1], max_tokens=1)
    path = engine.follow(ids)
    pages, last, still = engine._parts.pager.arrays, path.layers[-1], 0
    with ModelFile.open(model) as file:
        for expert, frames in last.frames.items():
            if pages.table[7, expert].tolist() == frames.tolist():  # not thrown out by a later wave
                begin, size = file.extent(7, expert)
                assert pages.frames[frames].tobytes() == os.pread(file.fileno(), size, begin)
                still += 1
    assert still > 0
    assert path.logits.tobytes() == engine.logits(ids)[-1].tobytes()
    assert len(path.layers) == 8 and path.ids == ids and f"token {ids[-1]} " in repr(path)
    for before, visit in zip(path.layers, path.layers[1:], strict=False):
        assert before.left.tobytes() == visit.entered.tobytes()
    for visit in path.layers:
        assert visit.chosen.shape == visit.shares.shape == (2,) and visit.shares.sum() == pytest.approx(1, abs=1e-5)
        assert visit.router_logits.argmax() == visit.chosen[0]
        assert visit.keys.shape == visit.values.shape and len(visit.keys) == len(set(visit.places.tolist())) == len(ids)
        assert visit.waves[0][0] == 0 and visit.waves[-1][1] == 16
        assert sorted(visit.frames) == sorted(visit.chosen.tolist())
        assert min(frames.min() for frames in visit.frames.values()) >= 0
    assert said.index == 0 and engine.counters()["kv"]["slots_used"] == 0


def test_the_routes_are_those_of_the_tokens(load: Load) -> None:
    engine = load()
    ids = engine.tokenizer.encode(PROMPT)
    tokens = list(engine.generate(ids, max_tokens=5))
    for i, token in enumerate(tokens[1:]):
        path = engine.follow([*ids, *(t.id for t in tokens[: i + 1])])
        assert [visit.chosen.tolist() for visit in path.layers] == token.experts.tolist()
        assert np.array_equal([visit.shares for visit in path.layers], token.weights)
        assert int(path.logits.argmax()) == token.id


def test_dense_layers_choose_nobody(tmp_path: Path) -> None:
    made = make("qwen2_moe", decoder_sparse_step=2, num_hidden_layers=4).save(tmp_path / "hf")
    with Engine.load(convert(made, tmp_path / "out", quantize="fp32")) as engine:
        path = engine.follow([3, 5, 8])
    assert [len(visit.chosen) for visit in path.layers] == [0, 2, 0, 2]
    assert [len(visit.router_logits) for visit in path.layers] == [0, 8, 0, 8]
    assert [len(visit.waves) for visit in path.layers] == [0, 1, 0, 1]
    assert all(len(visit.keys) == 3 and len(visit.left) == 32 for visit in path.layers)


def test_company_and_refusals_leave_the_engine_as_it_was(load: Load) -> None:
    engine = load(max_batch_size=2, prefill_chunk=2)
    backend = engine._parts.transformer.backend
    alone = [t.id for t in engine.generate(PROMPT, max_tokens=60)]
    right, heard = engine.follow(PROMPT).logits.tobytes(), []
    other = Thread(target=lambda: heard.extend(t.id for t in engine.generate(PROMPT, max_tokens=60)))
    other.start()
    while other.is_alive():
        path = engine.follow(PROMPT)
        assert path.logits.tobytes() == right and len(path.layers) == 8
    assert heard == alone
    with pytest.raises(RequestError, match="no whole number"):
        engine.follow([1, 1 << 30])
    assert engine._parts.transformer.backend is backend
