"""Any small architecture, quantisation, backend and chunk equals the float64 oracle: what nobody thought to list."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from colibri_lab.convert import convert
from tests.makers import FAMILIES, make
from tests.oracle.goldens import error
from tests.oracle.numpy_oracle import Oracle

from .models import engine, greedy, levels, logits

YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 40}
QUANTISED = [("fp32", 32), ("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128)]


@st.composite
def architectures(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """(family, overrides) of a model that transformers could load."""
    family = draw(st.sampled_from(FAMILIES))
    kv_heads, shared_by = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * shared_by, 2 * draw(st.integers(1, 20))
    stated = family != "olmoe" and draw(st.booleans())
    hidden = draw(st.integers(8, 150)) if stated else heads * head_dim
    experts, layers = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    one = {"mixtral": ("num_local_experts", "intermediate_size"), "olmoe": ("num_experts", "intermediate_size")}
    count, width = one.get(family, ("num_experts", "moe_intermediate_size"))
    made: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(8, 150)),
        count: experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 5))),
        width: draw(st.integers(1, 150)),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_theta": draw(st.sampled_from([100.0, 10000.0, 1e6])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "max_position_embeddings": 64,
    }
    if stated:
        made["head_dim"] = head_dim
    if draw(st.booleans()):
        made["rope_scaling"] = draw(st.sampled_from([{"type": "linear", "factor": 2.5}, YARN]))
    if family == "mixtral":
        made["head_dim"] = head_dim
        made["sliding_window"] = draw(st.sampled_from([None, 1, 5, 16]))
    else:
        made["norm_topk_prob"] = draw(st.booleans())
    if family in ("qwen2_moe", "qwen3_moe"):
        sparse = draw(st.integers(0, layers - 1))
        made["mlp_only_layers"] = [i for i in range(layers) if i != sparse and draw(st.booleans())]
        made["intermediate_size"] = draw(st.integers(1, 100))
        if draw(st.booleans()):
            made |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 20))}
            made["max_window_layers"] = draw(st.integers(0, layers))
    if family == "qwen2_moe":
        made["shared_expert_intermediate_size"] = draw(st.integers(1, 100))
        made["qkv_bias"] = draw(st.booleans())
    if family in ("qwen3_moe", "olmoe"):
        made["attention_bias"] = draw(st.booleans())
    if family == "olmoe":
        made["clip_qkv"] = draw(st.sampled_from([None, 0.3, 2.0]))
    return family, made


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    architectures(),
    st.integers(0, 999),
    st.sampled_from(QUANTISED),
    st.sampled_from(["reference", *levels()]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_equals_the_oracle(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: tuple[str, dict[str, Any]],
    seed: int,
    stored: tuple[str, int],
    level: str,
    length: int,
    chunk: int,
) -> None:
    family, overrides = architecture
    quantize, group = stored
    made = make(family, seed, exact="" if quantize == "fp32" else quantize, **overrides)
    ids = np.random.default_rng(seed).integers(0, made.config["vocab_size"], length).tolist()
    right, routing = Oracle(made.config, made.tensors).forward(ids)
    assume(routing.margin() > 1e-4)
    at = Path(tmp_path_factory.mktemp("shape"))
    try:
        path = convert(made.save(at / "hf"), at / "out", quantize=quantize, group_size=group)
        how: dict[str, Any] = {"backend": level} if level == "reference" else {"isa": level}
        with engine(path, prefill_chunk=chunk, **how) as model:
            assert error(logits(model, ids), right) < 3e-5
            tokens = greedy(model, ids, 3)
            whole = Oracle(made.config, made.tensors).logits([*ids, *tokens])[len(ids) - 1 : -1]
            best = whole.max(1)
            assert (best - whole[np.arange(len(tokens)), tokens] < 1e-4 * np.abs(whole).max()).all()
    finally:
        shutil.rmtree(at)
