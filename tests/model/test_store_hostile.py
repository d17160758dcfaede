"""model.colibri is hostile until proved otherwise: every lie in its header, every cut, every flipped bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from colibri_lab.model.errors import ModelError
from colibri_lab.model.store import ModelFile
from colibri_lab.model.writer import metadata_checksum
from colibri_lab.ops.layout import PAGE
from tests.makers import make


@pytest.mark.parametrize("name", ["nothing", "empty", "text", "folder"])
def test_not_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("a longer text that is no model")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match=name):
        ModelFile.open(tmp_path / name)


def test_a_plain_checkpoint_is_no_model_file(tmp_path: Path) -> None:
    hf = make("mixtral").save(tmp_path)
    with pytest.raises(ModelError, match="run colibri-lab convert"):
        ModelFile.open(hf / "model.safetensors")


Change = Callable[[dict[str, Any]], None]


def edited(model: Path, at: Path, change: Change, *, fix: bool = True, pad: int | None = None) -> Path:
    """The model with another header; fix: renew the metadata's checksum."""
    data = (model / "model.colibri").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    if fix:
        header["__metadata__"]["checksum"] = metadata_checksum(header["__metadata__"])
    text = json.dumps(header).encode()
    text += b" " * ((length if pad is None else pad) - len(text))
    at.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return at


def _spec(**facts: Any) -> Change:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"]["spec"] = json.dumps(json.loads(header["__metadata__"]["spec"]) | facts)

    return change


def _meta(**values: Any) -> Change:
    return lambda header: header["__metadata__"].update(values)


def _rename(old: str, new: str) -> Change:
    def change(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    return change


def _swap(a: str, b: str) -> Change:
    def change(header: dict[str, Any]) -> None:
        header[a], header[b] = header[b], header[a]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_meta(version="2"), "format version '2', this version reads 1"),
        (_meta(format="pt"), "is no model file"),
        (_meta(quantize="int3"), "'int3' is none of"),
        (_meta(group="33"), "group size 33 is none of"),
        (_meta(group="-1"), "group '-1' is not a number"),
        (_meta(spec="{"), "spec: not JSON"),
        (_meta(spec="[]"), "spec: holds list"),
        (_spec(layers=1 << 40), "layers is"),
        (_spec(experts=1 << 13, top_k=2), "its spec wants"),
        (_spec(experts=7), r"the spec wants F32 \[7, 32\]"),
        (_spec(hidden_size=64), "the spec wants"),
        (_spec(expert_ffn=1 << 19), "the spec wants"),
        (_spec(heads="4"), "heads is '4', not int"),
        (_spec(surprise=1), "unknown fact 'surprise'"),
        (_spec(sparse=[True]), "sparse has 1 entries"),
        (_rename("layers.1.experts.3", "layers.1.experts.8"), r"'layers.1.experts.3' is missing"),
        (_rename("head", "heat"), r"'head' is missing"),
        (_swap("head", "layers.0.input_norm"), r"'layers.0.input_norm' is U8|'head' is F32"),
        (lambda h: h["layers.1.router"].update(dtype="U32"), r"'layers.1.router' is U32"),
        (lambda h: h["layers.1.router"].update(shape=[32, 8]), r"'layers.1.router' is F32 \[32, 8\]"),
        (lambda h: h.pop("__metadata__"), "is no model file"),
        (lambda h: h["__metadata__"].pop("identity"), "lacks identity"),
    ],
)
def test_hostile_headers(model: Path, tmp_path: Path, change: Change, message: str) -> None:
    def tolerant(header: dict[str, Any]) -> None:
        change(header)
        header.setdefault("__metadata__", {})

    with pytest.raises(ModelError, match=message) as caught:
        ModelFile.open(edited(model, tmp_path / "bad.colibri", tolerant))
    assert "bad.colibri" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metadata_has_a_checksum(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not match its checksum"):
        ModelFile.open(edited(model, tmp_path / "bad.colibri", _spec(norm_eps=0.5), fix=False))


def test_experts_must_begin_at_pages(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not at a page"):
        ModelFile.open(edited(model, tmp_path / "bad.colibri", lambda header: None, pad=70_000))


def test_truncated_and_longer_files(model: Path, tmp_path: Path) -> None:
    data = (model / "model.colibri").read_bytes()
    bad = tmp_path / "model.colibri"
    for size in (7, 8, 1000, PAGE, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"model\.colibri"):
            ModelFile.open(tmp_path)
    bad.write_bytes(data + b"x")
    with pytest.raises(ModelError, match="belong to none"):
        ModelFile.open(tmp_path)


def test_a_flipped_bit_is_found(model: Path, tmp_path: Path) -> None:
    data = bytearray((model / "model.colibri").read_bytes())
    with safe_open(model / "model.colibri", "np") as official:
        names = [n for n in official.keys() if "experts" not in n and "checksums" not in n]
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    for name in names:
        begin, end = header[name]["data_offsets"]
        at = 8 + length + (begin + end) // 2
        data[at] ^= 16
        (tmp_path / "model.colibri").write_bytes(data)
        with ModelFile.open(tmp_path) as file, pytest.raises(ModelError, match=f"'{name}' does not match its checksum"):
            file.weights()
        data[at] ^= 16


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 1 << 20), byte=st.integers(0, 255), cut=st.integers(0, 3))
def test_damage_is_an_error_or_harmless(
    model: Path, tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int
) -> None:
    """Any byte of header or data changed: refused, or every weight that is read is still right."""
    path = tmp_path_factory.getbasetemp() / "damaged.colibri"
    data = bytearray((model / "model.colibri").read_bytes())
    used = 8 + len(data[8 : data.index(b"  ", 8)])
    data[at % (used if at % 2 else len(data))] = byte
    path.write_bytes(data[: len(data) - cut * 1000])
    try:
        with ModelFile.open(path) as file:
            file.weights()
            for layer in file.spec.sparse_layers:
                for expert in range(file.spec.experts):
                    begin, size = file.extent(layer, expert)
                    assert PAGE <= begin <= begin + size <= len(data)
    except ModelError as error:
        assert "damaged.colibri" in str(error)
