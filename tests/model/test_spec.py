"""config.json into facts.

Defaults by family, nulls, windows, rotary embedding, end tokens, and what is refused (A1-A8).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.model.errors import ModelError
from colibri_lab.model.families import FAMILIES, read_spec
from colibri_lab.model.jsonfile import dumps, parse_object, strict
from colibri_lab.model.spec import ModelSpec, Rope, rope_tables
from tests.makers import ABSENT, base_config

GOLDENS = json.loads((Path(__file__).parent / "rope_goldens.json").read_text())


def spec(family: str = "mixtral", generation: dict[str, Any] | None = None, **overrides: Any) -> ModelSpec:
    return read_spec(base_config(family, **overrides), "config.json", generation)


# (family, role): class defaults of transformers 5.24
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"vocab_size": 32000, "hidden_size": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
    | {
        "max_positions": 131072,
        "norm_eps": 1e-5,
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 14336,
        "normalise_top_k": True,
    }
    | {
        "bos": 1,
        "eos": (2,),
        "qkv_bias": False,
        "o_bias": False,
        "qk_norm": "",
        "rope": Rope(1e6),
        "window": (0,) * 32,
    },
    "qwen2_moe": {"vocab_size": 151936, "hidden_size": 2048, "layers": 24, "heads": 16, "kv_heads": 16, "head_dim": 128}
    | {
        "max_positions": 32768,
        "norm_eps": 1e-6,
        "experts": 60,
        "top_k": 4,
        "expert_ffn": 1408,
        "normalise_top_k": False,
    }
    | {"bos": None, "eos": (), "qkv_bias": True, "o_bias": False, "shared_ffn": 5632, "rope": Rope(1e4)},
    "qwen3_moe": {"vocab_size": 151936, "hidden_size": 2048, "layers": 24, "heads": 32, "kv_heads": 4, "head_dim": 64}
    | {
        "max_positions": 32768,
        "norm_eps": 1e-6,
        "experts": 128,
        "top_k": 8,
        "expert_ffn": 768,
        "normalise_top_k": False,
    }
    | {
        "bos": None,
        "eos": (),
        "qkv_bias": False,
        "o_bias": False,
        "qk_norm": "head",
        "shared_ffn": 0,
        "rope": Rope(1e4),
    },
    "olmoe": {"vocab_size": 50304, "hidden_size": 2048, "layers": 16, "heads": 16, "kv_heads": 16, "head_dim": 128}
    | {"max_positions": 4096, "norm_eps": 1e-5, "experts": 64, "top_k": 8, "expert_ffn": 2048, "normalise_top_k": False}
    | {"bos": None, "eos": (50279,), "qkv_bias": False, "qk_norm": "flat", "clip_qkv": None, "rope": Rope(1e4)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_class_defaults(family: str) -> None:
    got = read_spec({"model_type": family}, "config.json")
    want = CLASS_DEFAULTS[family]
    assert {role: getattr(got, role) for role in want} == want
    assert not got.tied
    assert all(got.sparse)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_absent(family: str) -> None:
    nulls = ["head_dim", "rope_scaling", "rope_parameters", "mlp_only_layers", "norm_topk_prob", "clip_qkv"]
    nulls += [
        "decoder_sparse_step",
        "tie_word_embeddings",
        "attention_bias",
        "qkv_bias",
        "max_window_layers",
        "layer_types",
    ]
    clean = spec(family, **dict.fromkeys(nulls, ABSENT))
    for key in nulls:
        assert spec(family, **dict.fromkeys(nulls, ABSENT) | {key: None}) == clean, key
    assert spec(family, **dict.fromkeys(nulls)) == clean
    assert spec(family, num_key_value_heads=None).kv_heads == 4


def test_absent_key_value_heads_are_the_class_default() -> None:
    with pytest.raises(ModelError, match="4 attention heads cannot share 8 key/value heads"):
        spec("mixtral", num_key_value_heads=ABSENT)
    assert spec("qwen3_moe", num_key_value_heads=ABSENT).kv_heads == 4
    assert spec("olmoe", num_key_value_heads=ABSENT).kv_heads == 4


def test_dense_and_sparse_layers() -> None:  # A1
    a1 = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 48}
    for family in ("qwen2_moe", "qwen3_moe"):
        got = spec(family, **a1)
        assert got.sparse_layers == (1, 5)
        assert (got.dense_ffn, got.expert_ffn) == (48, 16)


def test_normalisation() -> None:  # D1
    assert spec("mixtral").normalise_top_k
    assert spec("mixtral", norm_topk_prob=False).normalise_top_k, "Mixtral has no such key"
    for family in ("qwen2_moe", "qwen3_moe", "olmoe"):
        assert not spec(family, norm_topk_prob=ABSENT).normalise_top_k
        assert spec(family, norm_topk_prob=True).normalise_top_k


def test_windows() -> None:
    assert spec("mixtral", sliding_window=7).window == (7, 7)
    assert spec("mixtral", sliding_window=0).window == (0, 0)
    assert spec("olmoe", sliding_window=7).window == (0, 0), "OLMoE has no sliding window"
    assert spec("qwen3_moe", sliding_window=7).window == (0, 0)
    assert spec("qwen3_moe", sliding_window=7, use_sliding_window=True).window == (7, 7)
    assert spec("qwen3_moe", sliding_window=None, use_sliding_window=True).window == (0, 0)
    on = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 5}
    assert spec("qwen2_moe", **on).window == (7, 0, 7, 0, 7)
    assert spec("qwen2_moe", **on, max_window_layers=3).window == (7, 0, 7, 0, 0)
    types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    assert spec("qwen2_moe", **on, layer_types=types).window == (0, 7, 0, 7, 0)
    with pytest.raises(ModelError, match="turns it off"):
        spec("qwen2_moe", sliding_window=7, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ModelError, match="chunked_attention"):
        spec("qwen2_moe", **on, layer_types=["chunked_attention"] * 5)


@pytest.mark.parametrize("case", GOLDENS["cases"])
def test_rope_tables_are_those_of_transformers(case: str) -> None:
    golden = GOLDENS["cases"][case]
    theta = {"rope_theta": ABSENT} | golden["config"]
    got = spec("mixtral", head_dim=16, max_position_embeddings=4096, **theta)
    for table, name in zip(rope_tables(got), ("cos", "sin"), strict=True):
        assert table.dtype == np.float32
        assert table.shape == (4096, 8)
        np.testing.assert_allclose(table[GOLDENS["positions"]], golden[name], rtol=0, atol=2e-7)


def test_rope_scaling_is_used() -> None:  # A6
    plain = spec("mixtral", head_dim=16)
    linear = spec("mixtral", head_dim=16, rope_scaling={"type": "linear", "factor": 4})
    positions = np.arange(0, 64)
    for a, b in zip(rope_tables(plain), rope_tables(linear), strict=True):
        np.testing.assert_allclose(a[positions], b[4 * positions], atol=1e-6)
        assert np.abs(a - b).max() > 1e-2
    block = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert spec("mixtral", rope_scaling={**block, "attention_factor": 1.0}).rope.attention_factor == 1.0
    assert spec("mixtral", rope_scaling=block).rope.attention_factor == pytest.approx(1.13863, abs=1e-5)
    assert spec("mixtral", rope_parameters=block).rope.original_positions == 64
    assert spec("mixtral", rope_parameters={"rope_theta": 5e5}).rope == Rope(5e5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "zzz"}}, "rope type 'zzz' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"rope_theta": "many"}, "rope_theta is 'many'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only silu"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"hidden_size": 30}, "no multiple of 4 heads"),
        ({"num_experts_per_tok": 9}, "9 experts per token of only 8"),
        ({"num_experts": 8, "num_local_experts": 7}, "contradict each other"),
        ({"num_experts": 0, "num_local_experts": 0}, "dense model"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 1e12}, "num_hidden_layers is 1000000000000"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec(family, **change)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_refused_architectures() -> None:
    with pytest.raises(ModelError, match="'gpt_oss' is not known; known are mixtral, olmoe, qwen2_moe, qwen3_moe"):
        read_spec({"model_type": "gpt_oss", "hidden_size": 8, "num_local_experts": 32}, "config.json")
    with pytest.raises(ModelError, match="'llama' is a dense model"):
        read_spec({"model_type": "llama", "hidden_size": 8}, "config.json")
    with pytest.raises(ModelError, match="dense model"):
        spec("qwen3_moe", mlp_only_layers=[0, 1])
    with pytest.raises(ModelError, match="'none stated' is not known"):
        read_spec({}, "config.json")
    named = base_config("olmoe", model_type=ABSENT)
    assert read_spec(named, "config.json").family == "olmoe"


@pytest.mark.parametrize(
    ("own", "generation", "want"),
    [
        (7, {"eos_token_id": [7, 5]}, (7, 5)),  # A8
        (7, {"eos_token_id": 5}, (5, 7)),
        (7, {"eos_token_id": None}, (7,)),
        ([7, 9], None, (7, 9)),
        (None, {"eos_token_id": [5]}, (5,)),
        (None, None, ()),
        (-1, None, ()),
        (ABSENT, {"eos_token_id": [5]}, (5,)),
        (ABSENT, None, (2,)),  # Mixtral's class default
        (99, None, ()),  # past the vocabulary: can never come
    ],
)
def test_end_tokens(own: Any, generation: dict[str, Any] | None, want: tuple[int, ...]) -> None:
    assert spec("mixtral", generation, eos_token_id=own).eos == want


def test_json_as_it_is_found() -> None:  # A2
    clean = spec("mixtral")
    text = json.dumps(base_config("mixtral", time_step_limit=[0.0, float("inf")]), indent=1)
    assert "Infinity" in text
    found = parse_object(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(), "config.json")
    assert read_spec(found, "config.json") == clean
    ours = dumps(strict(found))
    assert json.loads(ours, parse_constant=lambda name: pytest.fail(name))["time_step_limit"] == [0.0, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_json_round_trip(family: str) -> None:
    before = spec(family, eos_token_id=[2, 5], rope_scaling={"type": "linear", "factor": 2.5}, clip_qkv=0.5)
    text = dumps(before.to_json())
    assert ModelSpec.from_json(json.loads(text)) == before
