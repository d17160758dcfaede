"""Step 5 of 5: checkpoint -> Hugging Face Mixtral folder with fp16 weights.

python data/scripts/tiny_moe/export.py OUT [--work data/training]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizer import BOS, EOS
from torch import Tensor


def layer_tensors(layer: int, weights: dict[str, Tensor], c: dict[str, Any]) -> dict[str, Tensor]:
    """One layer's tensors under Mixtral's names."""
    ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
    query, key = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    q, k, v = weights[ours + "attention.qkv"].split([query, key, key])
    out = {
        "input_layernorm": weights[ours + "input_norm"],
        "post_attention_layernorm": weights[ours + "post_norm"],
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": weights[ours + "attention.o"],
        "block_sparse_moe.gate": weights[ours + "moe.gate"],
    }
    for expert in range(c["experts"]):
        gate, up = weights[ours + "moe.w13"][expert].split(c["ffn"])
        name = f"block_sparse_moe.experts.{expert}."
        out |= {name + "w1": gate, name + "w3": up, name + "w2": weights[ours + "moe.w2"][expert]}
    return {f"{theirs}{name}.weight": tensor for name, tensor in out.items()}


def config_json(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": c["vocab"],
        "hidden_size": c["hidden"],
        "intermediate_size": c["ffn"],
        "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"],
        "head_dim": c["head_dim"],
        "num_local_experts": c["experts"],
        "num_experts_per_tok": c["top_k"],
        "max_position_embeddings": c["context"],
        "rms_norm_eps": 1e-5,
        "rope_theta": c["theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": c["theta"]},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.01,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float16",
        "dtype": "float16",
    }


GENERATION = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "max_new_tokens": 300,
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "</s>",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--work", type=Path, default=Path("data/training"), help="folder of train.py")
    chosen = parser.parse_args()
    checkpoint = torch.load(chosen.work / "run" / "checkpoint.pt")
    c, weights = checkpoint["config"], checkpoint["weights"]
    tensors = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    for layer in range(c["layers"]):
        tensors |= layer_tensors(layer, weights, c)
    tensors = {name: tensor.half().contiguous().clone() for name, tensor in tensors.items()}
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise SystemExit(f"not finite in fp16: {', '.join(bad[:3])}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, chosen.out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((chosen.work / "tokenizer.json").read_text())
    (chosen.out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    texts = {
        "config.json": config_json(c),
        "generation_config.json": GENERATION,
        "tokenizer_config.json": {**TOKENIZER, "model_max_length": c["context"]},
    }
    for name, form in texts.items():
        (chosen.out / name).write_text(json.dumps(form, indent=1) + "\n")
    count = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{chosen.out}: {count / 1e6:.2f} M parameters after {checkpoint['step']} steps, {checkpoint['tokens']} tokens"
    )


if __name__ == "__main__":
    main()
