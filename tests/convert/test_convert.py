"""A folder in, a folder out: every family and dtype, tying, shards, links, names, and what is written beside the model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.model.errors import ModelError, ModelWarning
from colibri_lab.model.store import ModelFile
from colibri_lab.ops.pack import unpack
from tests.makers import ABSENT, FAMILIES, Checkpoint, as_dtype, from_bf16, make, rounded, write_safetensors

AWKWARD = {"head_dim": 12, "hidden_size": 40, "moe_intermediate_size": 25}
PROJECTIONS = {"mixtral": ("w1", "w3", "w2"), "other": ("gate_proj", "up_proj", "down_proj")}


def contents(out: Path) -> dict[str, Any]:
    """Every weight of a converted model as float32, by the source's names."""
    found: dict[str, Any] = {}
    with ModelFile.open(out) as file:
        spec, weights = file.spec, file.weights()
        names = PROJECTIONS.get(spec.family, PROJECTIONS["other"])
        block = "block_sparse_moe" if spec.family == "mixtral" else "mlp"

        def put(name: str, value: Any) -> None:
            if value is not None:
                found[name] = np.asarray(value, np.float32)

        def swiglu(prefix: str, ffn: Any) -> None:
            for name in ("gate", "up", "down"):
                part = getattr(ffn, name)
                put(f"{prefix}.{name}_proj.weight", unpack(part.data, part.layout))

        for i, layer in enumerate(weights.layers):
            at, a = f"model.layers.{i}", layer.attention
            put(f"{at}.input_layernorm.weight", layer.input_norm)
            put(f"{at}.post_attention_layernorm.weight", layer.post_norm)
            ends = [spec.q_rows, spec.q_rows + spec.kv_rows]
            for letter, rows in zip("qkv", np.split(unpack(a.qkv.data, a.qkv.layout), ends), strict=True):
                put(f"{at}.self_attn.{letter}_proj.weight", rows)
            if a.qkv_bias is not None:
                for letter, rows in zip("qkv", np.split(a.qkv_bias, ends), strict=True):
                    put(f"{at}.self_attn.{letter}_proj.bias", rows)
            put(f"{at}.self_attn.o_proj.weight", unpack(a.o.data, a.o.layout))
            put(f"{at}.self_attn.o_proj.bias", a.o_bias)
            put(f"{at}.self_attn.q_norm.weight", a.q_norm)
            put(f"{at}.self_attn.k_norm.weight", a.k_norm)
            if layer.dense is not None:
                swiglu(f"{at}.mlp", layer.dense)
                continue
            put(f"{at}.{block}.gate.weight", layer.gate)
            if layer.shared is not None and layer.shared_gate is not None:
                swiglu(f"{at}.mlp.shared_expert", layer.shared)
                put(f"{at}.mlp.shared_expert_gate.weight", layer.shared_gate[None])
            for expert in range(spec.experts):
                begin, size = file.extent(i, expert)
                run = np.frombuffer(os.pread(file.fileno(), size, begin), np.uint8)
                for name, layout in zip(names, file.expert_layout, strict=True):
                    put(f"{at}.{block}.experts.{expert}.{name}.weight", unpack(run, layout))
        put("model.norm.weight", weights.final_norm)
        head = unpack(weights.head.data, weights.head.layout)
        put("model.embed_tokens.weight", head if spec.tied else weights.embedding)
        if not spec.tied:
            put("lm_head.weight", head)
    return found


def assert_same(out: Path, tensors: dict[str, Any]) -> None:
    found = contents(out)
    assert set(found) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", ["plain", "awkward"])
def test_fp32_holds_every_source_exactly(family: str, dtype: str, shape: str, tmp_path: Path) -> None:
    awkward = AWKWARD | {"attention_bias": True, "num_experts" if family != "mixtral" else "num_local_experts": 7}
    if family == "olmoe":
        awkward["head_dim"] = ABSENT
    if "qwen" in family:
        awkward |= {"decoder_sparse_step": 2, "num_hidden_layers": 3}
    made = make(family, **(awkward if shape == "awkward" else {}))
    out = convert(made.save(tmp_path / "hf", dtype=dtype), tmp_path / "out", quantize="fp32")
    assert_same(out, made.as_seen(dtype).tensors)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_exact_weights_survive(family: str, quantize: str, tied: bool, tmp_path: Path) -> None:
    kind = {"fp16": "", "int8": "int8", "int4": "int4"}[quantize]
    made = make(family, exact=kind, tie_word_embeddings=tied)
    if quantize == "fp16":
        made = made.as_seen("F16")
    out = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize=quantize)
    found = contents(out)
    for name, value in made.tensors.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_bf16_subnormals_survive(tmp_path: Path) -> None:
    made = make("mixtral")
    bits = np.arange(1, 33, dtype=np.uint16)
    bits[::2] |= 0x8000
    made.tensors["model.norm.weight"] = from_bf16(bits)
    assert (np.abs(made.tensors["model.norm.weight"]) < 1e-38).all()
    out = convert(made.save(tmp_path / "hf", dtype="BF16"), tmp_path / "out")
    with ModelFile.open(out) as file:
        np.testing.assert_array_equal(file.weights().final_norm, from_bf16(bits))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_and_fused_experts_are_the_same_model(family: str, tmp_path: Path) -> None:
    made = make(family, exact="int4")
    one = convert(made.save(tmp_path / "one"), tmp_path / "out1")
    many = convert(made.save(tmp_path / "many", shards=3), tmp_path / "out3")
    shutil.copytree(tmp_path / "many", tmp_path / "no-index")
    (tmp_path / "no-index" / "model.safetensors.index.json").unlink()
    bare = convert(tmp_path / "no-index", tmp_path / "out-bare")
    fused = convert(_fuse(made).save(tmp_path / "fused"), tmp_path / "outf")
    want = contents(one)
    for out in (many, bare, fused):
        assert_same(out, want)
    with ModelFile.open(one) as a, ModelFile.open(many) as b:
        assert a.identity == b.identity


def _fuse(made: Checkpoint) -> Checkpoint:
    """The form that holds all experts of a layer in two tensors."""
    mixtral = made.config["model_type"] == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    names = PROJECTIONS["mixtral" if mixtral else "other"]
    tensors = {name: t for name, t in made.tensors.items() if ".experts." not in name}
    if mixtral:
        tensors = {name.replace("block_sparse_moe", "mlp"): t for name, t in tensors.items()}
    for i in range(made.config["num_hidden_layers"]):
        old, new = f"model.layers.{i}.{block}.experts", f"model.layers.{i}.mlp.experts"
        gate, up, down = (np.stack([made.tensors[f"{old}.{e}.{name}.weight"] for e in range(8)]) for name in names)
        tensors |= {f"{new}.gate_up_proj": np.concatenate([gate, up], 1), f"{new}.down_proj": down}
    return Checkpoint(made.config, tensors)


def test_identity_is_the_sources(tmp_path: Path) -> None:
    """The same for every quantisation; another when a weight or a fact differs."""
    made = make("qwen3_moe")
    hf = made.save(tmp_path / "hf")
    seen = set()
    for quantize in ("fp32", "fp16", "int8", "int4"):
        with ModelFile.open(convert(hf, tmp_path / quantize, quantize=quantize)) as file:
            seen.add(file.identity)
            assert file.source == "hf"
    assert len(seen) == 1
    made.tensors["model.norm.weight"][3] += 1
    with ModelFile.open(convert(made.save(tmp_path / "b"), tmp_path / "b2")) as file:
        seen.add(file.identity)
    with ModelFile.open(convert(made.with_config(rope_theta=5e5).save(tmp_path / "c"), tmp_path / "c2")) as file:
        seen.add(file.identity)
    assert len(seen) == 3


# --- tying, A7


def size(out: Path) -> int:
    return (out / "model.colibri").stat().st_size


@pytest.mark.parametrize("quantize", ["fp32", "fp16", "int8", "int4"])
def test_tied_is_stored_once(quantize: str, tmp_path: Path) -> None:
    big = {"vocab_size": 4096, "hidden_size": 64}
    tied = convert(make("olmoe", tie_word_embeddings=True, **big).save(tmp_path / "a"), tmp_path / "ta", quantize=quantize)
    both = convert(make("olmoe", **big).save(tmp_path / "b"), tmp_path / "tb", quantize=quantize)
    matrix = 4096 * 64 * (4 if quantize == "fp32" else 2)
    saved = size(both) - size(tied)
    if quantize == "int4":  # a tied head is kept in 8 bits, an untied one in 4
        saved += 4096 * 64 // 2
    assert abs(saved - matrix) < 3 * 65536
    with ModelFile.open(tied) as file:
        weights = file.weights()
        assert file.spec.tied
        assert weights.embedding is None
        assert weights.head.layout.dtype == {"int4": "int8"}.get(quantize, quantize)


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    made = make("mixtral")
    del made.tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"'lm_head.weight' is missing and tie_word_embeddings is false"):
        convert(made.save(tmp_path / "hf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tied_with_a_stored_head(tmp_path: Path) -> None:
    made = make("mixtral", tie_word_embeddings=True)
    embedding = made.tensors["model.embed_tokens.weight"]
    same = Checkpoint(made.config, made.tensors | {"lm_head.weight": embedding})
    with ModelFile.open(convert(same.save(tmp_path / "same"), tmp_path / "o1", quantize="fp32")) as file:
        assert file.spec.tied
    other = Checkpoint(made.config, made.tensors | {"lm_head.weight": embedding + 1})
    with pytest.warns(ModelWarning, match=r"lm_head\.weight and model\.embed_tokens\.weight are both stored and differ"):
        out = convert(other.save(tmp_path / "other"), tmp_path / "o2", quantize="fp32")
    assert_same(out, other.tensors)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    swapped = {"lm_head.weight" if "embed" in name else name: t for name, t in made.tensors.items()}
    out = convert(Checkpoint(made.config, swapped).save(tmp_path / "head"), tmp_path / "o3", quantize="fp32")
    assert_same(out, made.tensors)


# --- what lies beside the model


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


# --- Hub cache, I3


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
    with pytest.raises(ModelError, match=rf"{name}: links to ../../blobs/\w+, which is not there: the download is incomplete"):
        convert(snapshot, tmp_path / "out")
    blob.write_bytes(data)
    convert(snapshot, tmp_path / "out")


def test_half_precision_matches_what_a_reader_sees(tmp_path: Path) -> None:
    made = make("mixtral")
    mixed = {n: as_dtype(t, ("F32", "F16", "BF16")[i % 3]) for i, (n, t) in enumerate(made.tensors.items())}
    hf = made.save(tmp_path / "hf")
    write_safetensors(hf / "model.safetensors", mixed)
    want = {n: rounded(t, ("F32", "F16", "BF16")[i % 3]) for i, (n, t) in enumerate(made.tensors.items())}
    assert_same(convert(hf, tmp_path / "out", quantize="fp32"), want)
