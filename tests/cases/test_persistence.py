"""E5 and what can go wrong with a folder: other models and settings, no rights, no room, no folder."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.convert import convert
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError
from tests.kv.stored import indexes, load, prompt, said, store, taken, tiny

PROMPT = prompt(1, 60)
TOKENS = 40


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(at: Path) -> Path:
    return tiny(at)


@pytest.fixture(scope="module")
def right(model: Path) -> Any:
    with load(model, None) as engine:
        return said(engine, PROMPT, TOKENS)


class Sorted:
    """A router of somebody else's: the exact choice, with weights that are all alike."""

    def __init__(self, identity: str | None) -> None:
        if identity is not None:
            self.identity = identity

    def select(self, layer: int, logits: Any) -> Any:
        ids = (-logits).argsort(axis=1, kind="stable")[:, :2]
        return ids, ids * 0 + 0.5


def test_e5_another_conversion_or_model_shares_nothing(model: Path, at: Path, tmp_path: Path) -> None:
    """One prompt under three conversions and two seeds of one model in one folder: each computes its own, once."""
    other = tiny(at, seed=6)
    variants = [model, other]
    for quantize in ("int8", "fp32"):
        variants.append(convert(at / "hf-5", at / f"model-{quantize}", quantize=quantize))
    for path in variants:
        with load(path, None) as engine:
            alone = said(engine, PROMPT, TOKENS)
        for again in (False, True):
            with load(path, tmp_path) as engine:
                assert said(engine, PROMPT, TOKENS) == alone
                assert (engine.counters()["persistence"]["tokens_restored"] > 0) == again
    assert len(indexes(tmp_path)) == len(variants)
    copied = shutil.copytree(model, at / "under-another-name")
    assert store(copied, tmp_path, PROMPT)["tokens_restored"] > 0, "the same contents elsewhere are the same model"


SETTINGS: list[dict[str, Any]] = [
    {},
    {"router_top_k": 1},
    {"router": "int8_lut"},
    {"router": "int8_lut", "router_quant_bits": 12},
    {"router_dtype": "int8"},
    {"precision": "exact"},
    {"backend": "reference"},
    {"kv_cache_dtype": "fp32"},
    {"kv_cache_slot_size": 16},
    {"router": Sorted("a")},
    {"router": Sorted("b")},
]


def test_e5_settings_that_change_keys_share_nothing(model: Path, tmp_path: Path) -> None:
    kinds = set()
    for change in SETTINGS:
        with load(model, None, **change) as engine:
            alone = said(engine, PROMPT, 3)
        with load(model, tmp_path, **change) as engine:
            assert said(engine, PROMPT, 3) == alone
            kv = engine.counters()["persistence"]
            assert kv["tokens_restored"] == 0 and kv["refused_damaged"] == 0
            kinds |= {why.split(":")[0] for why in engine.describe()["kv_persistence"]["refused"].values()}
    assert kinds == {"foreign", "layout"} and len(indexes(tmp_path)) == len(SETTINGS)
    for change in SETTINGS:
        assert store(model, tmp_path, PROMPT, **change)["tokens_restored"] == 59, "and each finds its own again"


def test_e5_what_changes_no_bit_shares_everything(model: Path, tmp_path: Path, right: Any) -> None:
    store(model, tmp_path, PROMPT)
    for change in ({"threads": 2}, {"prefill_chunk": 3}, {"kv_cache_max_slots": 300}, {"eviction_policy": "lru"}):
        with load(model, tmp_path, **change) as engine:
            assert said(engine, PROMPT, TOKENS) == right
            assert engine.counters()["persistence"]["tokens_restored"] > 0


def test_a_router_that_does_not_say_what_it_is_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_persistence_path: router Sorted .* give it a text `identity`"):
        load(model, tmp_path, router=Sorted(None))


def test_a_path_that_can_be_no_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"kv_cache_persistence_path: .*file.*: cannot be used as a folder \("):
            load(model, path)
    with load(model, tmp_path / "made" / "on the way") as engine:
        assert engine.describe()["kv_persistence"]["state"] == "on"


def test_settings_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_quota_bytes: .* kv_cache_persistence_path"):
        load(model, None, kv_cache_quota_bytes=1)
    with pytest.raises(ConfigError, match=r"kv_cache_slot_size 7 makes 3584 bytes, the nearest that fits is 8$"):
        load(model, tmp_path, kv_cache_slot_size=7)
    with pytest.raises(ConfigError, match=r"the nearest that fits is 8$"):
        load(model, tmp_path, kv_cache_slot_size=1)


@contextmanager
def disk(at: Path, size: str) -> Iterator[bool]:
    """A file system of its own at a folder; False where the system does not let us make one."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True)
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(at)], check=True)


@contextmanager
def short_files(size: int) -> Iterator[None]:
    """No file may grow past `size` bytes in this process: to a writer, the same as a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def check_full(engine: Engine, folder: Path, right: Any, stored: int = 0) -> None:
    """stored: prefixes that had room before the first that had none."""
    with pytest.warns(RuntimeWarning, match=r"kv_cache_persistence_path: .*nothing more is stored") as warned:
        assert said(engine, PROMPT, TOKENS) == right
        assert said(engine, PROMPT, TOKENS) == right
    kv, told = engine.counters()["persistence"], engine.describe()["kv_persistence"]
    assert len(warned) == 1 and str(folder) in str(warned[0].message)
    assert kv["stopped"] == 1 and told["state"] == "stopped" and str(folder) in told["reason"]
    assert engine.counters()["kv"]["slots_used"] == 0 == kv["slots_spilled"]
    assert len(list(folder.iterdir())) == 2 * stored == 2 * len(indexes(folder)), "nothing unfinished fills the disk"
    assert engine.telemetry.facts["kv_persistence"]["state"] == "stopped"


def test_a_full_disk_stops_persistence_and_nothing_else(model: Path, tmp_path: Path, right: Any) -> None:
    """On a real file system of 128 KiB where one can be mounted; the request needs more, while it runs."""
    with disk(tmp_path, "128k") as mounted, load(model, tmp_path) as engine:
        if mounted:
            check_full(engine, tmp_path, right)
            assert os.statvfs(tmp_path).f_bavail > 0
        else:
            with short_files(1 << 16):
                check_full(engine, tmp_path, right)


@pytest.mark.parametrize(("size", "stored"), [(1, 0), (4096, 0), (20_000, 0), (100_000, 0), (300_000, 1)])
def test_any_place_where_writing_fails(model: Path, tmp_path: Path, right: Any, size: int, stored: int) -> None:
    with load(model, tmp_path) as engine, short_files(size):
        check_full(engine, tmp_path, right, stored)
    with load(model, tmp_path) as engine:  # what was stored before is as good as any
        assert said(engine, PROMPT, TOKENS) == right
        assert engine.counters()["persistence"]["tokens_restored"] == 59 * stored


def test_an_index_that_finds_no_room(model: Path, tmp_path: Path, right: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is there and the index cannot be written: the thread that syncs says so, the engine stops storing."""
    with load(model, tmp_path) as engine:
        monkeypatch.setattr(type(engine._parts.persistence.folder), "publish", _no_room)
        with pytest.warns(RuntimeWarning, match="No space left"):
            for _ in range(3):
                assert said(engine, PROMPT, TOKENS) == right
                engine._parts.persistence.settle()
        assert engine.counters()["persistence"]["prefixes_stored"] == 0 and not list(tmp_path.iterdir())


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_is_read_only(model: Path, tmp_path: Path, right: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is used; new prefixes are not stored, with one warning."""
    with disk(tmp_path, "4m") as mounted:
        store(model, tmp_path, PROMPT)
        there = taken(tmp_path)
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        else:
            monkeypatch.setattr("colibri_lab.kv.persist_folder.open_new", _read_only)
        with load(model, tmp_path) as engine:
            with pytest.warns(RuntimeWarning, match="Read-only file system") as warned:
                assert said(engine, PROMPT, TOKENS) == right
                said(engine, prompt(2, 50), TOKENS)
            assert len(warned) == 1 and engine.counters()["persistence"]["tokens_restored"] == 59
            assert said(engine, PROMPT, TOKENS) == right
            assert engine.counters()["persistence"]["tokens_restored"] == 118
        assert taken(tmp_path) == there


def _read_only(path: Path) -> int:
    raise OSError(30, "Read-only file system", str(path))


def test_a_folder_that_vanishes(model: Path, tmp_path: Path, right: Any) -> None:
    folder = tmp_path / "prefixes"
    with load(model, folder) as engine:
        shutil.rmtree(folder)
        with pytest.warns(RuntimeWarning, match="No such file"):
            assert said(engine, PROMPT, TOKENS) == right
        assert engine.counters()["persistence"]["stopped"] == 1
