"""Wrong input: one line that names file and tensor, and nothing written."""

from __future__ import annotations

import json
import os
import struct
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.convert import convert
from colibri_lab.model.errors import ModelError
from tests.makers import ABSENT, Checkpoint, header_of, make, write_raw, write_safetensors


def refused(folder: Path, message: str, **how: Any) -> str:
    """The message of a refusal, which left nothing at all behind."""
    out = folder.parent / "out"
    before = sorted(os.listdir(folder.parent))
    with pytest.raises(ModelError, match=message) as caught:
        convert(folder, out, **how)
    text = str(caught.value)
    assert "\n" not in text
    assert sorted(os.listdir(folder.parent)) == before
    return text


Edit = Callable[[Path], object]


def _index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    found = json.loads(path.read_text())
    change(found["weight_map"])
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
            r"model-00002-of-00003\.safetensors: missing \(1 of 3",
        ),
        (
            lambda f: os.truncate(f / "model-00003-of-00003.safetensors", 5000),
            r"00003-of-00003\.safetensors: .*truncated",
        ),
        (lambda f: os.truncate(f / "model-00003-of-00003.safetensors", 0), "the download is incomplete"),
        (lambda f: (f / "config.json").unlink(), r"config\.json: not there"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json: holds list"),
        (lambda f: (f / "generation_config.json").write_text("x"), r"generation_config\.json: not JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), r"index\.json: has no weight_map"),
        (
            lambda f: _index(f, lambda m: m.update(x="../other.safetensors")),
            r"weight_map names '../other\.safetensors'",
        ),
        (lambda f: _index(f, lambda m: m.update(x="/etc/passwd")), r"weight_map names '/etc/passwd'"),
        (
            lambda f: _index(f, lambda m: m.update(ghost="model-00001-of-00003.safetensors")),
            r"tensor 'ghost' is missing",
        ),
        (
            lambda f: _drop(f, "model.safetensors.index.json", "model-00002-of-00003.safetensors"),
            r"00002-of-00003.*missing",
        ),
    ],
)
def test_damaged_folders(tmp_path: Path, edit: Edit, message: str) -> None:
    folder = make("mixtral").save(tmp_path / "hf", shards=3)
    edit(folder)
    refused(folder, message)


def _drop(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def test_folders_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such folder")
    folder = make("mixtral").save(tmp_path / "hf")
    with pytest.raises(ModelError, match="pass the folder that holds it"):
        convert(folder / "model.safetensors", tmp_path / "out")
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no weights")
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"):
        (folder / name).write_bytes(b"\x80\x02}q\x00.")
        text = refused(folder, f"{name}: pickle weights .* are refused")
        assert "save_pretrained" in text
        (folder / name).unlink()


def with_tensors(at: Path, change: Callable[[dict[str, Any]], object], family: str = "mixtral", **config: Any) -> Path:
    made = make(family, **config)
    tensors: dict[str, Any] = dict(made.tensors)
    change(tensors)
    folder = made.save(at / "hf")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"hf: tensor '{EXPERT}' is missing"),
        (lambda t: t.pop("model.norm.weight"), r"tensor 'model.norm.weight' is missing"),
        (
            lambda t: t.update({EXPERT: np.zeros((16, 32), np.float32)}),
            rf"model\.safetensors: tensor '{EXPERT}' has shape \[16, 32\]",
        ),
        (lambda t: t.update({EXPERT: np.zeros((32, 16), np.float64)}), rf"'{EXPERT}' is F64: only F32"),
        (
            lambda t: t.update({EXPERT: ("F8_E4M3", (32, 16), bytes(512))}),
            r"is F8_E4M3: the checkpoint is quantised already",
        ),
        (lambda t: t.update({EXPERT: np.zeros((32, 16), np.int8)}), r"is I8: the checkpoint is quantised already"),
        (
            lambda t: t.update({"model.layers.0.mystery": np.zeros(3, np.float32)}),
            r"'model.layers.0.mystery' would not be used",
        ),
        (
            lambda t: t.update({EXPERT + "_scale_inv": np.ones((1, 1), np.float32)}),
            r"w2.weight_scale_inv' would not be used",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}),
            r"q_proj.bias' would not be used",
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": np.zeros(32, np.float32)}),
            r"layers.2.* would not be used",
        ),
        (lambda t: t[EXPERT].__setitem__((3, 4), np.nan), rf"'{EXPERT}' holds NaN or Infinity"),
        (lambda t: t["model.norm.weight"].__setitem__(3, np.inf), r"'model.norm.weight' holds NaN or Infinity"),
        (lambda t: t[EXPERT].__setitem__((3, 4), 3e38), rf"'{EXPERT}'.*too large for the fp16 scales"),
        (
            lambda t: t["model.embed_tokens.weight"].__setitem__((3, 4), 1e5),
            r"embed_tokens.weight': a value of 100000 does not fit",
        ),
    ],
)
def test_wrong_tensors(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    refused(with_tensors(tmp_path, change), message)


def test_already_quantised(tmp_path: Path) -> None:  # C4 a, b
    config = {"quantization_config": {"quant_method": "awq"}}
    packed = {EXPERT.replace("weight", "qweight"): np.zeros((16, 4), np.int32)}
    folder = with_tensors(tmp_path, lambda t: (t.pop(EXPERT), t.update(packed)), **config)
    refused(folder, r"w2.qweight' is I32: the checkpoint is quantised already \(awq\)")
    scales = {EXPERT + "_scale": np.ones(1, np.float32)}
    folder = with_tensors(tmp_path, lambda t: t.update(scales), quantization_config={"quant_method": "fp8"})
    refused(folder, r"would not be used by mixtral \(config.json says quantised with fp8\)")


def test_fp16_overflow_names_the_tensor(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path, lambda t: t[EXPERT].__setitem__((3, 4), -70000))
    refused(folder, rf"model\.safetensors: tensor '{EXPERT}': a value of 70000 does not fit fp16", quantize="fp16")
    convert(folder, tmp_path / "out", quantize="int8")


def test_lying_headers(tmp_path: Path) -> None:
    made = make("mixtral")
    folder = made.save(tmp_path / "hf")
    header, data = header_of(made.tensors)
    path = folder / "model.safetensors"
    header[EXPERT]["shape"] = [32, 17]
    write_raw(path, header, data)
    refused(folder, rf"model\.safetensors: tensor '{EXPERT}'.*needs 2176 bytes")
    header[EXPERT]["shape"] = [32, 16]
    write_raw(path, header, data[:-8])
    refused(folder, r"ends at byte .* truncated")
    write_raw(path, header, data, length=1 << 61)
    refused(folder, r"header claims")


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = make("mixtral").save(tmp_path / "hf", shards=2)
    first = folder / "model-00001-of-00002.safetensors"
    (folder / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())
    refused(folder, r"is also in model-00001-of-00002\.safetensors")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_oss"}, r"config\.json: architecture 'gpt_oss' is not known; known are mixtral"),
        (
            {"model_type": "llama", "num_local_experts": ABSENT, "num_experts_per_tok": ABSENT},
            "'llama' is a dense model",
        ),
        ({"rope_scaling": {"rope_type": "zzz"}}, "rope type 'zzz'"),
        ({"num_local_experts": 9}, "is missing|has shape"),
        ({"num_hidden_layers": 3}, r"'model.layers.2.*' is missing"),
        ({"num_hidden_layers": 4096, "num_local_experts": 16384}, "is missing|has shape"),
    ],
)
def test_wrong_configs(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    made = make("mixtral")
    refused(made.with_config(**config).save(tmp_path / "hf"), message)


def test_wrong_options(tmp_path: Path) -> None:
    folder = make("mixtral").save(tmp_path / "hf")
    refused(folder, r"has 8 experts a layer, --expert-split says 4", expert_split=4)
    refused(folder, r"'int3' is none of fp32, fp16, int8, int4", quantize="int3")
    refused(folder, r"group size 48 is none of 32, 64, 128", group_size=48)
    convert(folder, tmp_path / "ok", expert_split=8, quantize="fp16", group_size=48)


def test_wrong_targets(tmp_path: Path) -> None:
    folder = make("mixtral").save(tmp_path / "hf")
    with pytest.raises(ModelError, match="is the source folder itself"):
        convert(folder, tmp_path / "." / "hf", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file, not a folder"):
        convert(folder, tmp_path / "file")
    with pytest.raises(ModelError, match="file"):
        convert(folder, tmp_path / "file" / "below")
    os.symlink("nowhere", tmp_path / "dangling")
    with pytest.raises(ModelError, match="is a link to nothing"):
        convert(folder, tmp_path / "dangling")
    out = convert(folder, tmp_path / "out")
    stamp = (out / "model.colibri").stat().st_mtime_ns
    with pytest.raises(ModelError, match=r"out/model\.colibri: exists already"):
        convert(folder, out)
    assert (out / "model.colibri").stat().st_mtime_ns == stamp
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "notes.txt").write_text("mine")
    convert(folder, tmp_path / "dir")
    assert (tmp_path / "dir" / "notes.txt").read_text() == "mine"


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("mixtral").save(tmp_path / "hf")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 40, 0, 1 << 20))
    refused(folder, r"out: needs \d+ MiB, only 1 MiB are free there")


BASE = make("qwen2_moe", num_experts=2, num_experts_per_tok=1, num_hidden_layers=1)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1 << 20), byte=st.integers(0, 255), cut=st.sampled_from([0, 0, 0, 1, 100]))
def test_damaged_checkpoints(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int) -> None:
    """Any byte of the head changed: refused in one line, or the data is read as the library would read it."""
    base = tmp_path_factory.getbasetemp()
    folder = BASE.save(base / "fuzz")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    head = 8 + struct.unpack("<Q", data[:8])[0]
    data[at % head] = byte
    path.write_bytes(data[: len(data) - cut])
    try:
        convert(folder, base / "fuzz-out", quantize="fp32", overwrite=True)
    except ModelError as error:
        assert "\n" not in str(error)


def test_checkpoint_is_closed_after_errors(tmp_path: Path) -> None:
    folder = Checkpoint(BASE.config, {}).save(tmp_path / "hf")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        refused(folder, "is missing")
    assert len(os.listdir("/proc/self/fd")) == before
