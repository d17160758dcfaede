"""A1, A3, A4, A6, A7: what config.json says, seen in what the engine computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.events import PageKind
from colibri_lab.model.errors import ModelError
from colibri_lab.model.families import read_spec
from colibri_lab.model.spec import rope_tables
from colibri_lab.model.store import ModelFile
from tests.makers import ABSENT, Checkpoint, base_config, make
from tests.oracle.goldens import error
from tests.oracle.numpy_oracle import Oracle
from tests.parity.models import engine, logits

PROMPT = np.random.default_rng(1).integers(3, 60, 20).tolist()
A1 = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 48}


def run(made: Checkpoint, at: Path, **settings: Any) -> np.ndarray[Any, Any]:
    """Logits of PROMPT from a checkpoint converted to fp32."""
    with engine(convert(made.save(at / "hf"), at / "out", quantize="fp32"), **settings) as model:
        return logits(model, PROMPT)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_a1_only_sparse_layers_have_experts_and_page_in(family: str, tmp_path: Path) -> None:
    made = make(family, 21, **A1)
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    with ModelFile.open(path) as file:
        assert file.spec.sparse_layers == (1, 5)
        assert (file.spec.dense_ffn, file.spec.expert_ffn) == (48, 16)
        for layer in (0, 2, 3, 4):
            with pytest.raises(KeyError):
                file.extent(layer, 0)
    with engine(path, telemetry=True) as model:
        cursor = model.telemetry.cursor()
        ours = logits(model, PROMPT)
        pages = model.telemetry.read(cursor).pages
        faults = pages[pages["kind"] == PageKind.FAULT]
        assert set(faults["layer"].tolist()) == {1, 5}
    right = Oracle(made.config, made.tensors)
    assert error(ours, right.logits(PROMPT)) < 1e-5
    assert error(Oracle(made.config, made.tensors, {"sparse_from_zero"}).logits(PROMPT), right.logits(PROMPT)) > 1e-2


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a3_stated_head_dim_is_in_logits_and_in_kv_memory(family: str, tmp_path: Path) -> None:
    made = make(family, 22, head_dim=16)
    assert made.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (64, 32)
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    with engine(path, kv_cache_dtype="fp16") as model:
        # layers x (keys and values) x KV heads x head_dim x bytes; hidden / heads would be 8
        assert model.describe()["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    with engine(path) as model:
        right = Oracle(made.config, made.tensors).logits(PROMPT)
        assert error(logits(model, PROMPT), right) < 1e-5
    assert error(Oracle(made.config, made.tensors, {"quotient_scale"}).logits(PROMPT), right) > 1e-2


NULLS = ("head_dim", "sliding_window", "rope_scaling", "mlp_only_layers")


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_a4_null_is_absent(family: str, tmp_path: Path) -> None:
    """One null at a time, then all: byte-equal to the keys being absent; null KV heads are as many as heads."""
    made = make(family, 23, num_key_value_heads=4)
    absent = made.with_config(**dict.fromkeys(NULLS, ABSENT))
    right = run(absent, tmp_path / "absent")
    assert error(right, Oracle(absent.config, absent.tensors).logits(PROMPT)) < 1e-5
    for i, keys in enumerate(
        [*((key,) for key in NULLS), NULLS, ("num_key_value_heads",), (*NULLS, "num_key_value_heads")]
    ):
        ours = run(absent.with_config(**dict.fromkeys(keys)), tmp_path / str(i))
        assert np.array_equal(ours.view(np.uint32), right.view(np.uint32)), keys


def test_a4_absent_kv_heads_are_the_familys_default_not_null() -> None:
    config = base_config("qwen2_moe", num_attention_heads=32, hidden_size=256, num_key_value_heads=ABSENT)
    assert read_spec(config, "config.json").kv_heads == 16
    assert read_spec({**config, "num_key_value_heads": None}, "config.json").kv_heads == 32


def spec_of(**overrides: Any) -> Any:
    return read_spec(base_config("mixtral", **overrides), "config.json")


def test_a6_linear_scaling_by_its_old_name() -> None:
    """The angle at position 4p equals the unscaled one at p, for both cos and sin."""
    plain = rope_tables(spec_of())
    scaled = rope_tables(spec_of(rope_scaling={"type": "linear", "factor": 4}))
    for ours, right in zip(scaled, plain, strict=True):
        assert np.allclose(ours[::4], right[: len(ours[::4])], atol=1e-6)
        assert not np.allclose(ours[1:64], right[1:64], atol=1e-2)


def test_a6_stated_yarn_attention_factor_stands() -> None:
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    stated, formula = spec_of(rope_scaling={**yarn, "attention_factor": 1.0}), spec_of(rope_scaling=yarn)
    assert stated.rope.attention_factor == 1.0
    assert formula.rope.attention_factor == pytest.approx(1.13863, abs=1e-5)
    assert rope_tables(stated)[0][0].tolist() == [1.0] * 4
    assert rope_tables(formula)[0][0].tolist() == pytest.approx([1.13863] * 4, abs=1e-5)


def test_a6_unknown_scaling_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = make("mixtral", 24, rope_scaling={"rope_type": "zzz"}).save(tmp_path / "hf")
    with pytest.raises(ModelError, match="zzz"):
        convert(source, tmp_path / "out", quantize="fp32")
    assert not (tmp_path / "out" / "model.colibri").exists()


def test_a7_tied_head_is_stored_once(tmp_path: Path) -> None:
    """fp32, so that nothing but the head differs: the tied file is smaller by about one [V, H] matrix."""
    shape = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 32}
    sizes = {}
    for tied in (True, False):
        made = make("mixtral", 25, tie_word_embeddings=tied, **shape)
        path = convert(made.save(tmp_path / f"hf{tied}"), tmp_path / f"out{tied}", quantize="fp32")
        sizes[tied] = (path / "model.colibri").stat().st_size if path.is_dir() else path.stat().st_size
        with engine(path) as model:
            assert error(logits(model, PROMPT), Oracle(made.config, made.tensors).logits(PROMPT)) < 1e-5
    matrix = 4096 * 64 * 4
    assert 0.9 * matrix < sizes[False] - sizes[True] < 1.2 * matrix


def test_a7_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    made = make("mixtral", 26)
    del made.tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")


def test_a7_tied_with_another_head_stored_warns_and_follows_the_policy(tmp_path: Path) -> None:
    """[policy] docs/policies.md: the stored head is used, as in transformers, and a warning names both tensors."""
    tied = make("mixtral", 27, tie_word_embeddings=True)
    other = make("mixtral", 27).tensors["lm_head.weight"]
    both = Checkpoint(tied.config, {**tied.tensors, "lm_head.weight": other})
    with pytest.warns(UserWarning, match=r"(?s)(lm_head.*embed_tokens|embed_tokens.*lm_head)"):
        ours = run(both, tmp_path / "both")
    assert error(ours, Oracle(both.config, both.tensors).logits(PROMPT)) < 1e-5
    assert error(run(tied, tmp_path / "tied"), ours) > 1e-2  # control


def test_a7_tied_with_the_same_head_stored_is_tied(tmp_path: Path) -> None:
    tied = make("mixtral", 27, tie_word_embeddings=True)
    both = Checkpoint(tied.config, {**tied.tensors, "lm_head.weight": tied.tensors["model.embed_tokens.weight"]})
    assert np.array_equal(run(both, tmp_path / "both"), run(tied, tmp_path / "tied"))
