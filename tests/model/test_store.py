"""model.colibri: a valid safetensors file, aligned, readable past 4 GiB, unmoved by a file that takes its place."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from colibri_lab.convert import convert
from colibri_lab.model.families import read_spec
from colibri_lab.model.plan import make_plan
from colibri_lab.model.store import ModelFile
from colibri_lab.model.writer import header_bytes
from colibri_lab.ops.layout import PAGE
from colibri_lab.ops.pack import unpack
from tests.makers import FAMILIES, base_config, make


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
        arrays += [
            layer.input_norm,
            layer.post_norm,
            layer.attention.qkv.data,
            layer.attention.o.data,
            layer.attention.qkv_bias,
        ]
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


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:  # E6
    """A sparse file that takes no disk: experts on both sides of 2^31 and 2^32 are not mixed up."""
    spec = read_spec(
        base_config("mixtral", hidden_size=2048, intermediate_size=8192, num_hidden_layers=4), "config.json"
    )
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


def test_unpack_gives_the_sources_values(model: Path) -> None:
    made = make("qwen2_moe", exact="int4", decoder_sparse_step=2, num_hidden_layers=4).tensors
    with ModelFile.open(model) as file:
        weights = file.weights()
        for values, part in zip(file.expert(3, 6), ("gate", "up", "down"), strict=True):
            np.testing.assert_array_equal(values, made[f"model.layers.3.mlp.experts.6.{part}_proj.weight"])
        with pytest.raises(KeyError):
            file.expert(0, 0)  # a dense layer
    qkv = weights.layers[2].attention.qkv
    want = np.concatenate([made[f"model.layers.2.self_attn.{letter}_proj.weight"] for letter in "qkv"])
    np.testing.assert_array_equal(unpack(qkv.data, qkv.layout), want)
