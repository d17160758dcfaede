"""Tiny random checkpoints of the four families in Hugging Face's names and shapes, from a seed.

    make("qwen2_moe", seed=3, num_experts=7).save(folder)

Base shape: hidden 32, 4 heads, 2 KV heads, 2 layers, 8 experts, top-2, expert width 16, vocabulary 64. Any config key
may be overridden; `ABSENT` takes a key away. Weights are drawn so that attention is not uniform, routing margins and
logits are wide, and the head does not copy its input.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .safetensors_writer import as_dtype, rounded, write_safetensors
from .tokenizers import byte_tokenizer

F32 = np.ndarray[Any, np.dtype[np.float32]]
ABSENT = object()
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "torch_dtype": "float32",
}
FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "intermediate_size": 16, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "intermediate_size": 48,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "olmoe": {
        "num_experts": 8,
        "intermediate_size": 16,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
    },
}


def base_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of the base shape with overrides; a key set to ABSENT is left out."""
    config = {"architectures": [ARCHITECTURES[family]], "model_type": family, **COMMON, **FAMILY[family], **overrides}
    return {key: value for key, value in config.items() if value is not ABSENT}


@dataclass(frozen=True)
class Shape:
    """The numbers that say which tensors exist; read on its own, not through colibri_lab."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    ffn: int
    dense: int
    shared: int
    sparse: tuple[bool, ...]
    qkv_bias: bool
    o_bias: bool
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        family, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
        default_kv = {"mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4, "olmoe": heads}[family]
        bias = bool(config.get("attention_bias", False)) if family in ("qwen3_moe", "olmoe") else False
        qkv_bias = config.get("qkv_bias", True) if family == "qwen2_moe" else bias
        layers = config["num_hidden_layers"]
        if family in ("qwen2_moe", "qwen3_moe"):
            step, dense_layers = config.get("decoder_sparse_step", 1) or 1, config.get("mlp_only_layers") or []
            sparse = tuple(i not in dense_layers and (i + 1) % step == 0 for i in range(layers))
            ffn = config["moe_intermediate_size"]
        else:
            sparse, ffn = (True,) * layers, config["intermediate_size"]
        return cls(
            family,
            hidden,
            heads,
            config.get("num_key_value_heads", default_kv) or heads,
            config.get("head_dim") or hidden // heads,
            config["num_local_experts"] if family == "mixtral" else config["num_experts"],
            ffn,
            config.get("intermediate_size", 0),
            config.get("shared_expert_intermediate_size", 0) if family == "qwen2_moe" else 0,
            sparse,
            bool(qkv_bias),
            bias,
            bool(config.get("tie_word_embeddings", False)),
        )


@dataclass
class Checkpoint:
    """A config and its tensors as float32; `save` writes the folder."""

    config: dict[str, Any]
    tensors: dict[str, F32]
    generation: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)  # further files of the folder, as they are

    @property
    def hash(self) -> str:
        """SHA-256 over config and tensors: what a golden was made from."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.tensors):
            digest.update(name.encode() + str(self.tensors[name].shape).encode() + self.tensors[name].tobytes())
        return digest.hexdigest()

    def with_config(self, **overrides: Any) -> Checkpoint:
        """The same tensors under another config."""
        config = {k: v for k, v in {**self.config, **overrides}.items() if v is not ABSENT}
        return replace(self, config=config, tensors=dict(self.tensors), files=dict(self.files))

    def as_seen(self, dtype: str) -> Checkpoint:
        """What a reader sees once the tensors went through F16 or BF16."""
        return replace(self, tensors={name: rounded(t, dtype) for name, t in self.tensors.items()})

    def with_tokenizer(self, **kwargs: Any) -> Checkpoint:
        """Add a byte-level tokenizer.json of the model's vocabulary size (see makers.tokenizers)."""
        kwargs.setdefault("vocab_size", self.config["vocab_size"])
        files = {**self.files, "tokenizer.json": json.dumps(byte_tokenizer(**kwargs)).encode()}
        return replace(self, files=files)

    def save(self, folder: Path | str, *, dtype: str = "F32", shards: int = 1) -> Path:
        """Write config.json, the weights in `shards` files (with an index from 2 up) and the other files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        if self.generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(self.generation))
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        stored = {name: as_dtype(tensor, dtype) for name, tensor in self.tensors.items()}
        if shards == 1:
            write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
            return folder
        where = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(stored)}
        for file in sorted(set(where.values())):
            write_safetensors(folder / file, {n: t for n, t in stored.items() if where[n] == file}, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        return folder


def exact_4bit(rng: np.random.Generator, rows: int, cols: int, scale: float = 2.0**-5) -> F32:
    """Values that 4 bits hold exactly: `scale` times -7..7, and one -8 in each run of 32 inputs (or longer)."""
    codes = rng.integers(-7, 8, (rows, cols))
    for start in range(0, cols, 32):
        codes[np.arange(rows), rng.integers(start, min(start + 32, cols), rows)] = -8
    return (codes * scale).astype(np.float32)


def exact_8bit(rng: np.random.Generator, rows: int, cols: int, scale: float = 2.0**-9) -> F32:
    """Values that 8 bits hold exactly: `scale` times -127..127, and one of the two ends in each run of 32 inputs."""
    codes = rng.integers(-126, 127, (rows, cols))
    for start in range(0, cols, 32):
        at = rng.integers(start, min(start + 32, cols), rows)
        codes[np.arange(rows), at] = rng.choice([-127, 127], rows)
    return (codes * scale).astype(np.float32)


def make(family: str, seed: int = 0, *, exact: str = "", **overrides: Any) -> Checkpoint:
    """A random checkpoint. exact: "int4" or "int8" draws projections, head and (if tied) embedding from exact values.

    Router, shared gate, norms and biases are random float32 in any case, an untied embedding holds exact float16.
    """
    config = base_config(family, **overrides)
    s = Shape.of(config)
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    vocab, hidden = config["vocab_size"], s.hidden
    tensors: dict[str, F32] = {}

    def matrix(name: str, rows: int, cols: int, gain: float = 1.0, squeeze: bool = True) -> None:
        if exact and squeeze:
            tensors[name] = {"int4": exact_4bit, "int8": exact_8bit}[exact](rng, rows, cols)
        else:
            tensors[name] = rng.normal(0, gain / cols**0.5, (rows, cols)).astype(np.float32)

    def vector(name: str, size: int, mean: float, spread: float) -> None:
        tensors[name] = (mean + spread * rng.normal(size=size)).astype(np.float32)

    def swiglu(prefix: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        gate, up, down = names
        matrix(f"{prefix}.{gate}.weight", width, hidden, 1.5)
        matrix(f"{prefix}.{up}.weight", width, hidden, 1.5)
        matrix(f"{prefix}.{down}.weight", hidden, width, 1.5)

    if exact and s.tied:
        tensors["model.embed_tokens.weight"] = exact_8bit(rng, vocab, hidden)  # a tied head has 8 bits or more
    else:
        matrix("model.embed_tokens.weight", vocab, hidden, 2.5, squeeze=False)
    if exact:
        tensors["model.embed_tokens.weight"] = rounded(tensors["model.embed_tokens.weight"], "F16")
    for i, is_sparse in enumerate(s.sparse):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        vector(f"{layer}.input_layernorm.weight", hidden, 1.0, 0.2)
        for letter, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            matrix(f"{attention}.{letter}_proj.weight", heads * s.head_dim, hidden, 1.6)
            if s.qkv_bias:
                vector(f"{attention}.{letter}_proj.bias", heads * s.head_dim, 0.0, 0.5)
        matrix(f"{attention}.o_proj.weight", hidden, s.heads * s.head_dim, 1.5)
        if s.o_bias:
            vector(f"{attention}.o_proj.bias", hidden, 0.0, 0.3)
        if family == "qwen3_moe":
            vector(f"{attention}.q_norm.weight", s.head_dim, 1.3, 0.4)
            vector(f"{attention}.k_norm.weight", s.head_dim, 1.3, 0.4)
        elif family == "olmoe":
            vector(f"{attention}.q_norm.weight", s.heads * s.head_dim, 1.3, 0.4)
            vector(f"{attention}.k_norm.weight", s.kv_heads * s.head_dim, 1.3, 0.4)
        vector(f"{layer}.post_attention_layernorm.weight", hidden, 1.0, 0.2)
        if not is_sparse:
            swiglu(f"{layer}.mlp", s.dense)
            continue
        block = f"{layer}.block_sparse_moe" if family == "mixtral" else f"{layer}.mlp"
        matrix(f"{block}.gate.weight", s.experts, hidden, 2.0, squeeze=False)
        for e in range(s.experts):
            swiglu(
                f"{block}.experts.{e}",
                s.ffn,
                ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj"),
            )
        if s.shared:
            swiglu(f"{block}.shared_expert", s.shared)
            matrix(f"{block}.shared_expert_gate.weight", 1, hidden, 1.5, squeeze=False)
    vector("model.norm.weight", hidden, 1.0, 0.2)
    if not s.tied:
        matrix("lm_head.weight", vocab, hidden, 3.0)
    return Checkpoint(config, tensors)


def chain(following: dict[int, int], vocab: int = 64, **overrides: Any) -> Checkpoint:
    """A Mixtral with forced greedy text: after token i comes following[i], else 0; attention and experts are off."""
    made = make("mixtral", 0, vocab_size=vocab, hidden_size=vocab, num_attention_heads=2, head_dim=8, **overrides)
    for name, tensor in made.tensors.items():
        if name.endswith(("o_proj.weight", "w2.weight")):
            tensor[:] = 0
        elif "norm" in name:
            tensor[:] = 1
    made.tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    head = made.tensors["lm_head.weight"]
    head[:] = 0
    for token in range(vocab):
        head[following.get(token, 0), token] = 4
    return made
