"""A folder in, a folder out: every family and dtype, shards, fused experts, tying."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.model.errors import ModelError, ModelWarning
from colibri_lab.model.store import ModelFile
from tests.convert.contents import PROJECTIONS, assert_same, contents
from tests.makers import ABSENT, FAMILIES, Checkpoint, as_dtype, from_bf16, make, rounded, write_safetensors

AWKWARD = {"head_dim": 12, "hidden_size": 40, "moe_intermediate_size": 25}


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
    tied = convert(
        make("olmoe", tie_word_embeddings=True, **big).save(tmp_path / "a"), tmp_path / "ta", quantize=quantize
    )
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
    with pytest.warns(
        ModelWarning, match=r"lm_head\.weight and model\.embed_tokens\.weight are both stored and differ"
    ):
        out = convert(other.save(tmp_path / "other"), tmp_path / "o2", quantize="fp32")
    assert_same(out, other.tensors)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    swapped = {"lm_head.weight" if "embed" in name else name: t for name, t in made.tensors.items()}
    out = convert(Checkpoint(made.config, swapped).save(tmp_path / "head"), tmp_path / "o3", quantize="fp32")
    assert_same(out, made.tensors)


def test_half_precision_matches_what_a_reader_sees(tmp_path: Path) -> None:
    made = make("mixtral")
    mixed = {n: as_dtype(t, ("F32", "F16", "BF16")[i % 3]) for i, (n, t) in enumerate(made.tensors.items())}
    hf = made.save(tmp_path / "hf")
    write_safetensors(hf / "model.safetensors", mixed)
    want = {n: rounded(t, ("F32", "F16", "BF16")[i % 3]) for i, (n, t) in enumerate(made.tensors.items())}
    assert_same(convert(hf, tmp_path / "out", quantize="fp32"), want)
