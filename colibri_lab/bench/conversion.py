"""How fast a Hugging Face checkpoint becomes a model.colibri, and in how much memory."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.footprint import peaks
from colibri_lab.bench.harness import spread
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape

APART = 0.20  # between the quartiles of the rounds
PIECE = 1 << 23  # values that are drawn; a file repeats them


@dataclass(frozen=True)
class Plan:
    shape: Shape
    quantize: str = "int4"
    rounds: int = 3
    seed: int = 0


def run(plan: Plan) -> Result:
    """The command `convert` in a process of its own, on weights that were just written. ValueError without /proc."""
    if not Path("/proc/self/status").exists():
        raise ValueError("convert reads /proc/PID/status, which this system does not have")
    result = Result(f"convert {plan.shape.name}")
    ours.folder().mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=ours.folder()))
    try:
        size = write_checkpoint(plan.shape, folder / "hf", plan.seed)
        wall, cpu, memory = [], [], 0
        command = [sys.executable, "-m", "colibri_lab", "convert", str(folder / "hf"), str(folder / "out")]
        for _ in range(plan.rounds):
            begin, before = perf_counter(), _children()
            most, _out = peaks([*command, "--quantize", plan.quantize, "--overwrite"])
            wall.append(size / (perf_counter() - begin))
            cpu.append(size / (_children() - before))
            memory = max(memory, most["RssAnon"])
    finally:
        shutil.rmtree(folder)
    result.add("input, wall time", statistics.median(wall) / 1e6, "MB/s")
    result.add("input, CPU time of all threads", statistics.median(cpu) / 1e6, "MB/s a core")
    result.add("checkpoint", size / 1e6, "MB")
    result.add("memory, anonymous", memory / 1e6, "MB")
    result.notes.append(
        f"fp16 to {plan.quantize}, start of the process and syncing of the file included; the checkpoint lies in the "
        f"page cache; {plan.rounds} rounds"
    )
    if (apart := spread(cpu)) > APART:
        result.reasons.append(f"the rounds differ by {apart:.0%} between their quartiles")
    return result


def _children() -> float:
    """CPU seconds of all processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_checkpoint(shape: Shape, folder: Path, seed: int) -> int:
    """A Qwen3-MoE in Hugging Face format, fp16, one safetensors file; returns the bytes of its weights."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.ffn, "intermediate_size": shape.ffn,
        "norm_topk_prob": True, "max_position_embeddings": shape.positions, "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.theta, "hidden_act": "silu", "tie_word_embeddings": False, "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header, size = {}, 0
    for name, sizes in tensors(shape).items():
        end = size + 2 * int(np.prod(sizes))
        header[name] = {"dtype": "F16", "shape": sizes, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    values = np.random.default_rng(seed).standard_normal(PIECE, np.float32) * np.float32(0.02)
    piece = values.astype(np.float16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, size, len(piece)):
            file.write(piece[: size - start])
    return size


def tensors(shape: Shape) -> dict[str, list[int]]:
    """Name and shape of each tensor, as such checkpoints have them."""
    h, d = shape.hidden, shape.head_dim
    found = {"model.embed_tokens.weight": [shape.vocab, h], "lm_head.weight": [shape.vocab, h],
             "model.norm.weight": [h]}  # fmt: skip
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.input_layernorm.weight": [h], f"{at}.post_attention_layernorm.weight": [h]}
        found |= {f"{at}.self_attn.q_norm.weight": [d], f"{at}.self_attn.k_norm.weight": [d]}
        found[f"{at}.self_attn.q_proj.weight"] = [shape.heads * d, h]
        found |= {f"{at}.self_attn.{kv}_proj.weight": [shape.kv_heads * d, h] for kv in "kv"}
        found[f"{at}.self_attn.o_proj.weight"] = [h, shape.heads * d]
        found[f"{at}.mlp.gate.weight"] = [shape.experts, h]
        for expert in range(shape.experts):
            part = f"{at}.mlp.experts.{expert}"
            found |= {f"{part}.{name}_proj.weight": [shape.ffn, h] for name in ("gate", "up")}
            found[f"{part}.down_proj.weight"] = [h, shape.ffn]
    return found
