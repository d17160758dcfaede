"""Full slots leave anonymous memory for a mapped file, and come back to it when they are freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.kv.persist import map_limit
from colibri_lab.memory import map_anonymous, map_file, zeros

from .stored import SIZE, load, prompt, said, store

PROMPT = prompt(1, 60)


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def test_a_file_over_memory_and_back(tmp_path: Path) -> None:
    size = 64 << 20
    array = zeros((size,), np.uint8)
    array[:] = 1
    full = anonymous()
    (tmp_path / "data").write_bytes(b"\x02" * 4096 + bytes(size - 4096))
    with (tmp_path / "data").open("rb") as file:
        map_file(array[4096:-4096], file.fileno(), 4096)
    assert full - anonymous() > size - (1 << 20)
    assert array[4095] == 1 and array[4096] == 0 and not array[4096:-4096].any() and array[-1] == 1
    array[8192] = 7
    assert (tmp_path / "data").read_bytes()[8192] == 0, "what is written stays private"
    map_anonymous(array[4096:-4096])
    assert array[8192] == 0 and array[4095] == 1
    with pytest.raises(ValueError, match="not whole pages"):
        map_anonymous(array[100:5000])
    with pytest.raises(OSError):
        map_file(array, -1, 0)
    assert array[4095] == 1, "a mapping that fails leaves what was there"


def test_full_slots_leave_memory_while_a_request_runs(model: Path, tmp_path: Path, alone: Any) -> None:
    with load(model, tmp_path) as engine:
        stream = engine.generate(PROMPT, max_tokens=60)
        heard = [next(stream) for _ in range(40)]
        kv, parts = engine.counters()["persistence"], engine._parts
        full = sum(bits.bit_length() == SIZE for bits in parts.kv.slots.valid)
        assert full > 30 and kv["slots_spilled"] >= full - 12 and kv["bytes_spilled"] == kv["slots_spilled"] * 2 * 4096
        maps = Path("/proc/self/maps").read_text()
        assert maps.count(str(tmp_path)) > 10
        heard += list(stream)
        assert [(t.id, t.logprob, t.weights.tobytes()) for t in heard] == alone(PROMPT, 60)
        assert engine.counters()["persistence"]["slots_spilled"] == 0
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "a freed slot has memory of its own again"


@pytest.mark.parametrize("place", ["persist", "persist_restore"])
def test_a_mapping_that_fails_stops_persistence(
    model: Path, tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    calls = []

    def third(view: Any, fd: int, offset: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        map_file(view, fd, offset)

    if place == "persist_restore":
        store(model, tmp_path, PROMPT)
    monkeypatch.setattr(f"colibri_lab.kv.{place}.map_file", third)
    with load(model, tmp_path) as engine:
        with pytest.warns(RuntimeWarning, match="Cannot allocate memory"):
            assert said(engine, PROMPT, 30) == alone(PROMPT, 30)
        assert said(engine, PROMPT, 30) == alone(PROMPT, 30)
        kv = engine.counters()["persistence"]
        assert kv["stopped"] == 1 and kv["slots_spilled"] == engine.counters()["kv"]["slots_used"] == 0


def test_no_more_mappings_than_the_system_grants(model: Path, tmp_path: Path, alone: Any) -> None:
    """Past the limit slots stay in memory; they are stored and restored all the same."""
    for restored in (0, 59):
        with load(model, tmp_path) as engine:
            engine._parts.persistence._most_mapped = 4
            stream, most = engine.generate(PROMPT, max_tokens=30), 0
            heard = []
            for token in stream:
                heard.append((token.id, token.logprob, token.weights.tobytes()))
                most = max(most, engine.counters()["persistence"]["slots_spilled"])
            assert heard == alone(PROMPT, 30) and most == 4
            assert engine.counters()["persistence"]["tokens_restored"] == restored
    assert map_limit() >= 1000 and map_limit(tmp_path / "none") == 65530
