"""What lies around the weights: config, tokenizer, names of folders, the Hub's cache of links."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.model.errors import ModelError, ModelWarning
from colibri_lab.model.store import ModelFile
from tests.convert.contents import assert_same
from tests.makers import Checkpoint, make


def test_config_and_tokenizer_come_along(tmp_path: Path) -> None:
    made = make("mixtral", eos_token_id=7, time_step_limit=[0.0, float("inf")]).with_tokenizer()
    made.generation = {"eos_token_id": [7, 5]}
    hf = made.save(tmp_path / "hf")
    out = convert(hf, tmp_path / "out")
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.colibri", "tokenizer.json"]
    assert (out / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    config = json.loads((out / "config.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert config["eos_token_id"] == [7, 5]
    assert config["model_type"] == "mixtral"
    with ModelFile.open(out) as file:
        assert file.spec.eos == (7, 5)


def test_config_from_a_windows_editor(tmp_path: Path) -> None:  # A2
    made = make("olmoe")
    clean = convert(made.save(tmp_path / "hf"), tmp_path / "a")
    text = json.dumps({**made.config, "time_step_limit": [0.0, float("inf")]}, indent=1)
    (tmp_path / "hf" / "config.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    odd = convert(tmp_path / "hf", tmp_path / "b")
    assert (odd / "model.colibri").read_bytes() == (clean / "model.colibri").read_bytes()
    written = (odd / "config.json").read_text(encoding="ascii")
    assert json.loads(written, parse_constant=lambda name: pytest.fail(name))["time_step_limit"] == [0.0, None]


@pytest.mark.parametrize("name", ["with spaces", "ünï–çødé 模型", "a[b]*?", "-dash", ".hidden"])
def test_names_of_folders(name: str, tmp_path: Path) -> None:
    made = make("qwen2_moe")
    for dtype in ("F32", "F16"):
        out = convert(made.save(tmp_path / name / "hf", dtype=dtype), tmp_path / name / name, overwrite=True)
    assert out == tmp_path / name / name
    with ModelFile.open(out) as file:
        file.weights()
    assert sorted(os.listdir(tmp_path / name)) == sorted(["hf", name])
    out.rename(tmp_path / name / "moved")
    ModelFile.open(tmp_path / name / "moved").close()


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("mixtral").save(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    convert("hf", "out/deep/er")
    ModelFile.open("out/deep/er").close()
    monkeypatch.chdir(tmp_path / "hf")
    convert(".", "../other")
    with ModelFile.open("../other") as file:
        assert file.source == "hf"


def test_stale_quantization_config(tmp_path: Path) -> None:  # C4 c
    made = make("mixtral", quantization_config={"quant_method": "fp8"})
    with pytest.warns(ModelWarning, match=r"quantization_config \(fp8\) is stale"):
        out = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    assert_same(out, made.tensors)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_skipped_tensors(tmp_path: Path) -> None:
    made = make("mixtral")
    made.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    convert(made.save(tmp_path / "hf"), tmp_path / "out")


def test_gate_without_its_first_dimension(tmp_path: Path) -> None:
    made = make("qwen2_moe")
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    want = dict(made.tensors)
    made.tensors[name] = made.tensors[name][0]
    assert_same(convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32"), want)


def test_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    hf = make("mixtral").save(tmp_path / "hf")
    convert(hf, tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    convert(hf, tmp_path / "b", progress=True)
    captured = capfd.readouterr()
    assert captured.out == "", "a bar must not be mixed into piped text"


def hub(made: Checkpoint, at: Path, shards: int = 2) -> Path:
    """models--org--name/{blobs,snapshots/rev}: every file a relative link to a blob without a name."""
    flat = made.save(at / "flat", shards=shards)
    cache = at / "models--org--name"
    snapshot = cache / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, path in enumerate(sorted(flat.iterdir())):
        blob = cache / "blobs" / f"{i:040x}"
        path.rename(blob)
        os.symlink(os.path.join("..", "..", "blobs", blob.name), snapshot / path.name)
    return snapshot


def test_hub_cache(tmp_path: Path) -> None:
    made = make("qwen3_moe").with_tokenizer()
    snapshot = hub(made, tmp_path)
    out = convert(snapshot, tmp_path / "out", quantize="fp32")
    assert_same(out, made.tensors)
    assert not (out / "tokenizer.json").is_symlink()
    with ModelFile.open(out) as file:
        assert file.source == "org/name"
    os.symlink(snapshot, tmp_path / "link")
    assert_same(convert(tmp_path / "link", tmp_path / "out2", quantize="fp32"), made.tensors)
    with pytest.raises(ModelError, match="pass one of the folders under its snapshots"):
        convert(snapshot.parent.parent, tmp_path / "out3")


FILES = ["config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_incomplete_downloads(name: str, tmp_path: Path) -> None:
    snapshot = hub(make("mixtral").with_tokenizer(), tmp_path)
    blob = snapshot / os.readlink(snapshot / name)
    data = blob.read_bytes()
    blob.write_bytes(b"")
    with pytest.raises(ModelError, match=rf"snapshots/abc123/{name}: is empty: the download is incomplete"):
        convert(snapshot, tmp_path / "out")
    blob.unlink()
    with pytest.raises(
        ModelError, match=rf"{name}: links to ../../blobs/\w+, which is not there: the download is incomplete"
    ):
        convert(snapshot, tmp_path / "out")
    blob.write_bytes(data)
    convert(snapshot, tmp_path / "out")
