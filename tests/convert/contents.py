"""What a converted model holds, by the source's names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.model.store import ModelFile
from colibri_lab.ops.pack import unpack

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
