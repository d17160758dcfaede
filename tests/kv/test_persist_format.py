"""Any bytes in the folder: a prefix that is refused, or the right one; never a crash, a wrong token or a large read."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colibri_lab.kv.persist_format import BLOCK, HEAD, Index, Layout, Refused, head_bytes, index_bytes, read_index

from .stored import indexes, load, prompt, said, store, tiny

LAYOUT = Layout(b"i" * 32, 2, 4, 8, "fp16", 100, 5)
PLACES = 100
DATA = 2 * LAYOUT.slot_bytes * PLACES
PROMPT = prompt(1, 60)


def sample(seed: int = 0, tokens: int = 11) -> Index:
    """A sequence whose tokens went to random owners, as appending makes it."""
    rng = np.random.default_rng(seed)
    where = np.zeros((2, tokens), np.int32)
    first = rng.integers(-1, 5, (2, tokens)).astype(np.int16)
    rows: list[list[int]] = []
    for layer in range(2):
        open_: dict[int, int] = {}
        for position, owner in enumerate(first[layer].tolist()):
            if owner not in open_ or rows[open_[owner]][2] == LAYOUT.slot_size:
                open_[owner] = len(rows)
                rows.append([layer, owner, 0, len(rows), 0, 0])
            block = open_[owner]
            where[layer, position] = block * LAYOUT.slot_size + rows[block][2]
            rows[block][2] += 1
    places = rng.permutation(PLACES)[: len(rows)]
    blocks = np.array([(*row[:3], place, 1, 2) for row, place in zip(rows, places, strict=True)], BLOCK)
    return Index(rng.integers(0, 99, tokens).astype(np.int32), where, first, blocks)


def packed(index: Index, **change: Any) -> bytes:
    return Index(**{**index.__dict__, **change}).pack(LAYOUT)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_there_and_back(seed: int, tokens: int) -> None:
    index = sample(seed, tokens)
    data = index.pack(LAYOUT)
    back = read_index(data, LAYOUT, DATA)
    assert all((getattr(back, name) == getattr(index, name)).all() for name in ("tokens", "where", "first", "blocks"))
    assert len(data) == index_bytes(tokens, 2, len(index.blocks))


@settings(deadline=None)
@given(st.data())
def test_a_changed_index_is_refused(data: st.DataObject) -> None:
    whole = sample().pack(LAYOUT)
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "noise"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(whole) - 1))
        changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    elif kind == "cut":
        changed = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif kind == "longer":
        changed = whole + data.draw(st.binary(min_size=1, max_size=64))
    else:
        changed = data.draw(st.binary(max_size=400))
    with pytest.raises(Refused):
        read_index(changed, LAYOUT, DATA)


def bad() -> dict[str, bytes]:
    """Tables that contradict themselves, with checksums that are right."""
    index = sample()
    b, where = index.blocks, index.where

    def block(name: str, value: int, at: int = 0) -> Any:
        changed = b.copy()
        changed[name][at] = value
        return {"blocks": changed}

    def moved(layer: int, p: int, q: int) -> Any:
        changed = where.copy()
        changed[layer, [p, q]] = changed[layer, [q, p]]
        return {"where": changed}

    same = next((p, q) for p in range(11) for q in range(p + 1, 11) if where[0, p] // 4 == where[0, q] // 4)
    outside = where.copy()
    outside[1, 3] = len(b) * 4
    negative = where.copy()
    negative[0, 0] = -1
    other_layer = where.copy()
    other_layer[0, 0] = where[1, 0]
    expert = index.first.copy()
    expert[0, 0] = 5
    return {
        "layer": packed(index, **block("layer", 2)),
        "owner": packed(index, **block("owner", -2)),
        "owner too large": packed(index, **block("owner", 5)),
        "no fill": packed(index, **block("fill", 0)),
        "too full": packed(index, **block("fill", 5)),
        "another fill": packed(index, **block("fill", int(b["fill"][0]) % 4 + 1)),
        "place": packed(index, **block("place", -1)),
        "place past the data": packed(index, **block("place", 2**31 - 1)),
        "one place twice": packed(index, **block("place", int(b["place"][1]))),
        "order": packed(index, **moved(0, *same)),
        "outside": packed(index, where=outside),
        "negative": packed(index, where=negative),
        "another layer's block": packed(index, where=other_layer),
        "expert": packed(index, first=expert),
    }


@pytest.mark.parametrize("what", list(bad()))
def test_contradictions_are_refused(what: str) -> None:
    with pytest.raises(Refused, match=r"contradict|none that this model can have") as error:
        read_index(bad()[what], LAYOUT, DATA)
    assert error.value.kind == "damaged"


def test_huge_lengths_are_refused_before_they_are_believed() -> None:
    tokens = HEAD.pack(b"colibrKV", 1, LAYOUT.identity, 2, 4, 8, 0, 2**32 - 1, 2**32 - 1, 0, 0)
    blocks = HEAD.pack(b"colibrKV", 1, LAYOUT.identity, 2, 4, 8, 0, 100, 2**32 - 1, 0, 0)
    tracemalloc.start()
    for head in (tokens, blocks):
        for size in (HEAD.size, 2**31, 2**45):
            with pytest.raises(Refused, match="none that this model can have"):
                head_bytes(head, size, LAYOUT)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("at", "value", "kind"),
    [(8, 2, "foreign"), (12, 1, "foreign"), (44, 3, "layout"), (48, 8, "layout"), (52, 16, "layout"), (56, 1, "layout"),
     (56, 77, "layout")],
)  # fmt: skip
def test_why_it_is_refused(at: int, value: int, kind: str) -> None:
    data = bytearray(sample().pack(LAYOUT))
    struct.pack_into("<I", data, at, value)
    struct.pack_into("<I", data, HEAD.size - 4, zlib.crc32(data[HEAD.size :], zlib.crc32(data[: HEAD.size - 4])))
    with pytest.raises(Refused) as error:
        read_index(bytes(data), LAYOUT, DATA)
    assert error.value.kind == kind


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A model, a folder with one prefix, and what the prompt gives."""
    at = tmp_path_factory.mktemp("made")
    model = tiny(at)
    with load(model, None) as engine:
        right = said(engine, PROMPT)
    store(model, at / "prefixes", PROMPT)
    return model, at / "prefixes", right


def test_a_byte_anywhere_is_found_and_named(made: tuple[Path, Path, Any], tmp_path_factory: Any) -> None:
    """Flipped, cut off or zeroed, in either file: refused by name and computed anew, or not part of what is used."""
    model, folder, right = made
    files = sorted(folder.iterdir())
    assert [path.suffix for path in files] == [".index", ".kv"]
    contents = [path.read_bytes() for path in files]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, 1), st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.booleans())
    def check(which: int, share: float, flip: int, cut: bool) -> None:
        there = tmp_path_factory.mktemp("damaged")
        at = int(share * len(contents[which]))
        for i, (path, content) in enumerate(zip(files, contents, strict=True)):
            if i == which:
                content = content[:at] if cut else content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
            (there / path.name).write_bytes(content)
        with load(model, there) as engine:
            assert said(engine, PROMPT) == right
            kv, told = engine.counters()["persistence"], engine.describe()["kv_persistence"]["refused"]
            refused = kv["refused_damaged"] + kv["refused_foreign"] + kv["refused_layout"]
            assert (kv["prefixes_restored"] == 0) == (refused > 0), "used or refused, one of the two"
            if which == 0 and (cut or flip):
                assert refused == 1
            assert set(told) <= {files[0].name} and kv["stopped"] == 0

    check()


def test_a_hole_in_the_data_is_found(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    model, folder, right = made
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = next(tmp_path.glob("*.kv"))
    data.write_bytes(bytes(data.stat().st_size))
    with load(model, tmp_path) as engine:
        assert said(engine, PROMPT) == right
        told = engine.describe()["kv_persistence"]["refused"]
        assert list(told) == [indexes(folder)[0].name] and "does not match its checksum" in next(iter(told.values()))
        assert engine.counters()["kv"]["slots_used"] == 0


def test_junk_in_the_folder(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """Links, folders, pipes and other people's files, some under our names: nothing follows, hangs, or is removed."""
    model, folder, right = made
    name = "prefix-" + 15 * "0"
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "prefix-abc.kv").write_text("not our name")
    (tmp_path / f"{name}1.index").mkdir()
    os.mkfifo(tmp_path / f"{name}2.index")
    (tmp_path / f"{name}3.index").symlink_to(indexes(folder)[0])
    (tmp_path / f"{name}3.kv").symlink_to(next(folder.glob("*.kv")))
    (tmp_path / f"{name}4.index").symlink_to(tmp_path / f"{name}4.index")
    (tmp_path / f"{name}5.index").write_bytes(indexes(folder)[0].read_bytes())
    os.mkfifo(tmp_path / f"{name}5.kv")
    before = {path.name for path in tmp_path.iterdir()}
    with load(model, tmp_path, kv_cache_quota_bytes=1 << 20) as engine:
        assert said(engine, PROMPT) == right
        assert engine.counters()["persistence"]["prefixes_restored"] == 0
    after = {path.name for path in tmp_path.iterdir()}
    assert before - after <= {f"{name}5.index"} and len(after - before) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(folder.iterdir())) == 2
