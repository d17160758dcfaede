"""model.colibri: a valid safetensors file, aligned, checked on open, and hostile until proved otherwise."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from colibri_lab.convert import convert
from colibri_lab.model.errors import ModelError
from colibri_lab.model.families import read_spec
from colibri_lab.model.plan import make_plan
from colibri_lab.model.store import ModelFile, write_model
from colibri_lab.model.writer import header_bytes, metadata_checksum
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.pack import unpack
from tests.makers import FAMILIES, base_config, make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("store")
    return convert(make("qwen2_moe", exact="int4", decoder_sparse_step=2, num_hidden_layers=4).save(at / "hf"), at / "out")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", ["fp32", "fp16", "int8", "int4"])
def test_valid_safetensors(family: str, quantize: str, tmp_path: Path) -> None:
    out = convert(make(family).save(tmp_path / "hf"), tmp_path / "out", quantize=quantize)
    with ModelFile.open(out) as ours, safe_open(out / "model.colibri", "np") as official:
        assert official.metadata()["format"] == "colibri"
        assert json.loads(official.metadata()["spec"])["family"] == family
        data = (out / "model.colibri").read_bytes()
        for layer in ours.spec.sparse_layers:
            for expert in range(ours.spec.experts):
                at, size = ours.extent(layer, expert)
                assert at % PAGE == size % PAGE == 0
                run = official.get_tensor(f"layers.{layer}.experts.{expert}")
                assert run.shape == (ours.expert_pages, PAGE)
                assert run.tobytes() == data[at : at + size]
                assert [zlib.crc32(page) for page in run] == ours.checksums(layer, expert).tolist()
        assert ours.expert_bytes == 2 * 8 * ours.expert_pages * PAGE


def test_page_one_begins_the_data(model: Path) -> None:
    data = (model / "model.colibri").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    assert (8 + length) % PAGE == 0
    with ModelFile.open(model) as file:
        assert min(file.extent(i, e)[0] for i in file.spec.sparse_layers for e in range(8)) == 8 + length


def test_weights_are_aligned_and_whole(model: Path) -> None:
    with ModelFile.open(model) as file:
        weights, spec = file.weights(), file.spec
        resident = file.resident_bytes
    assert spec.sparse_layers == (1, 3)  # the file may be closed: weights are our own memory
    assert weights.embedding is not None
    assert weights.embedding.dtype == np.float16
    arrays: list[Any] = [weights.final_norm, weights.head.data, weights.embedding]
    for layer in weights.layers:
        assert (layer.gate is None) == (layer.dense is not None)
        assert (layer.shared is None) == (layer.dense is not None)
        arrays += [layer.input_norm, layer.post_norm, layer.attention.qkv.data, layer.attention.o.data, layer.attention.qkv_bias]
        if layer.gate is not None:
            assert layer.gate.shape == (8, 32)
            assert layer.shared_gate is not None
            assert layer.shared_gate.shape == (32,)
            arrays += [layer.gate, layer.shared_gate]
    for array in arrays:
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert array.flags.writeable
    assert weights.head.data.size % PAGE == 0
    assert resident > sum(a.nbytes for a in arrays)


def test_shows_itself(model: Path) -> None:
    with ModelFile.open(model) as file:
        shown = file._repr_html_()
        assert "<table>" in shown
        assert "int4, groups of 32" in shown
        assert "4, 2 dense" in shown
        assert "0x" not in repr(file)
        file.source = "<script>"
        assert "<script>" not in file._repr_html_()


def test_closing_and_asking_for_what_is_not_there(model: Path) -> None:
    file = ModelFile.open(model / "model.colibri")
    with pytest.raises(KeyError):
        file.extent(0, 0)  # a dense layer
    with pytest.raises(KeyError):
        file.checksums(1, 8)
    assert file.fileno() > 2
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.fileno()


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
        names = [n for n in official.keys() if "experts" not in n and "checksums" not in n]  # noqa: SIM118
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


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:  # E6
    """A sparse file that takes no disk: experts on both sides of 2^31 and 2^32 are not mixed up."""
    spec = read_spec(base_config("mixtral", hidden_size=2048, intermediate_size=8192, num_hidden_layers=4), "config.json")
    plan = make_plan(spec, "fp32", 0)
    head = header_bytes(plan, "1" * 64, "huge")
    path = tmp_path / "model.colibri"
    path.write_bytes(head)
    os.truncate(path, len(head) + plan.data_bytes)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.fail("the file system of the temporary folder has no sparse files")
    with ModelFile.open(tmp_path) as file:
        extents = [(file.extent(layer, expert), layer, expert) for layer in range(4) for expert in range(8)]
        assert extents[-1][0][0] > 1 << 32
        assert any(1 << 31 < at < 1 << 32 for (at, _), _, _ in extents)
        with path.open("r+b") as raw:
            for (at, size), layer, expert in extents:
                for place in (at, at + size - 8):
                    raw.seek(place)
                    raw.write(f"{layer} {expert:3d}   ".encode()[:8])
        for (at, size), layer, expert in extents:
            for place in (at, at + size - 8):
                assert os.pread(file.fileno(), 8, place) == f"{layer} {expert:3d}   ".encode()[:8]
                mapped = np.memmap(path, np.uint8, "r", offset=place, shape=8)
                assert mapped.tobytes() == f"{layer} {expert:3d}   ".encode()[:8]


def test_replaced_while_open(model: Path, tmp_path: Path) -> None:  # E7
    source = make("qwen2_moe", exact="int4", decoder_sparse_step=2, num_hidden_layers=4).save(tmp_path / "hf")
    out = convert(source, tmp_path / "out")
    with ModelFile.open(out) as file:
        before = file.weights().final_norm.copy()
        run = os.pread(file.fileno(), PAGE, file.extent(1, 0)[0])
        convert(make("qwen2_moe", seed=5).save(tmp_path / "other"), out, overwrite=True)
        assert os.pread(file.fileno(), PAGE, file.extent(1, 0)[0]) == run
        assert (file.weights().final_norm == before).all()
    with ModelFile.open(out) as file:
        assert file.spec.layers == 2


def test_write_model_takes_any_weights(tmp_path: Path) -> None:
    """What the benchmark does: weights from nowhere, through the same writer."""
    spec = read_spec(base_config("olmoe"), "config.json")
    plan = make_plan(spec, "fp32", 0)
    rng = np.random.default_rng(0)
    seen: list[tuple[int, int]] = []

    def experts(layer: int, expert: int, out: Any) -> None:
        assert not out.any()
        out[:] = layer * 16 + expert

    path = write_model(
        tmp_path / "model.colibri",
        spec,
        "fp32",
        0,
        lambda piece: [rng.integers(0, 9, piece.nbytes).astype(np.uint8)],
        experts,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == plan.data_bytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with ModelFile.open(path) as file:
        assert file.identity == "0" * 64
        assert os.pread(file.fileno(), 3, file.extent(1, 7)[0]) == bytes([23] * 3)
        file.weights()
    assert os.listdir(tmp_path) == ["model.colibri"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_write_model_leaves_nothing_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    spec = read_spec(base_config("olmoe"), "config.json")
    (tmp_path / "model.colibri").write_text("good")

    def experts(layer: int, expert: int, out: Any) -> None:
        if expert == 5:
            raise error

    with pytest.raises(error):
        write_model(tmp_path / "model.colibri", spec, "int4", 32, lambda piece: [], experts)
    with pytest.raises(ValueError, match=r"was given 0 bytes, it takes"):
        write_model(tmp_path / "model.colibri", spec, "int4", 32, lambda piece: [], lambda *a: None)
    assert os.listdir(tmp_path) == ["model.colibri"]
    assert (tmp_path / "model.colibri").read_text() == "good"


def test_unpack_gives_the_sources_values(model: Path) -> None:
    made = make("qwen2_moe", exact="int4", decoder_sparse_step=2, num_hidden_layers=4).tensors
    with ModelFile.open(model) as file:
        weights = file.weights()
        begin, size = file.extent(3, 6)
        run = np.frombuffer(os.pread(file.fileno(), size, begin), np.uint8)
        for layout, part in zip(file.expert_layout, ("gate", "up", "down"), strict=True):
            np.testing.assert_array_equal(unpack(run, layout), made[f"model.layers.3.mlp.experts.6.{part}_proj.weight"])
    qkv = weights.layers[2].attention.qkv
    want = np.concatenate([made[f"model.layers.2.self_attn.{letter}_proj.weight"] for letter in "qkv"])
    np.testing.assert_array_equal(unpack(qkv.data, qkv.layout), want)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
