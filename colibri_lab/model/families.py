"""The one table of families.

Which config key says what, what it means when it is not there, and how tensors are called.

Roles, keys and defaults follow transformers 5: a key that is absent or null has the family's class default, except
where null has a meaning of its own (key/value heads: as many as heads; sliding window, end token: none).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import ModelError
from .rope_config import read_rope
from .spec import LIMITS, ModelSpec, check_spec

ALIASES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "max_positions": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "tied": ("tie_word_embeddings",),
    "activation": ("hidden_act",),
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
}


@dataclass(frozen=True)
class Family:
    """What sets a family apart. `keys` adds to ALIASES; `defaults` are by role."""

    architecture: str
    defaults: dict[str, Any]
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    theta: float = 10000.0
    qk_norm: str = ""
    windows: str = "none"  # none | all (sliding_window) | switch (use_sliding_window) | layers (layer_types)
    block: tuple[str, ...] = ("mlp",)  # what the sparse block may be called, best first
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_PATTERN = {"sparse_step": ("decoder_sparse_step",), "dense_layers": ("mlp_only_layers",)}
_MOE_WIDTHS = {"expert_ffn": ("moe_intermediate_size",), "dense_ffn": ("intermediate_size",)}
_NORMALISE = {"normalise_top_k": ("norm_topk_prob",)}
_BIAS = {"qkv_bias": ("attention_bias",), "o_bias": ("attention_bias",)}
_COMMON: dict[str, Any] = {"tied": False, "activation": "silu", "bos": None, "eos": None, "normalise_top_k": False}
_COMMON |= {"sparse_step": 1, "dense_layers": []}

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        "MixtralForCausalLM",
        _COMMON
        | dict(vocab_size=32000, hidden_size=4096, layers=32, heads=32, kv_heads=8, max_positions=131072, norm_eps=1e-5)
        | dict(experts=8, top_k=2, expert_ffn=14336, bos=1, eos=2, normalise_top_k=True),
        {"expert_ffn": ("intermediate_size",)},  # no key for normalise_top_k: Mixtral always does
        theta=1e6,
        windows="all",
        block=("block_sparse_moe", "mlp"),
        expert=("w1", "w3", "w2"),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _COMMON
        | dict(
            vocab_size=151936, hidden_size=2048, layers=24, heads=16, kv_heads=16, max_positions=32768, norm_eps=1e-6
        )
        | dict(experts=60, top_k=4, expert_ffn=1408, dense_ffn=5632, shared_ffn=5632, qkv_bias=True),
        _PATTERN
        | _MOE_WIDTHS
        | _NORMALISE
        | {"shared_ffn": ("shared_expert_intermediate_size",), "qkv_bias": ("qkv_bias",)},
        windows="layers",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _COMMON
        | dict(vocab_size=151936, hidden_size=2048, layers=24, heads=32, kv_heads=4, max_positions=32768, norm_eps=1e-6)
        | dict(experts=128, top_k=8, expert_ffn=768, dense_ffn=6144, qkv_bias=False, o_bias=False),
        _PATTERN | _MOE_WIDTHS | _NORMALISE | _BIAS,
        qk_norm="head",
        windows="switch",
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _COMMON
        | dict(
            vocab_size=50304, hidden_size=2048, layers=16, heads=16, kv_heads=None, max_positions=4096, norm_eps=1e-5
        )
        | dict(experts=64, top_k=8, expert_ffn=2048, eos=50279, qkv_bias=False, o_bias=False),
        {"expert_ffn": ("intermediate_size",), "clip_qkv": ("clip_qkv",)} | _NORMALISE | _BIAS,
        qk_norm="flat",
    ),
}

_ABSENT = object()


class _Facts:
    """config.json seen through a family's table."""

    def __init__(self, config: dict[str, Any], family: Family, source: str) -> None:
        self.config, self.family, self.source = config, family, source
        self.keys = {**ALIASES, **family.keys}

    def fail(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")

    def raw(self, role: str) -> Any:
        """Value of the role's key; _ABSENT when no alias is there. Aliases that contradict each other are an error."""
        keys = [key for key in self.keys.get(role, ()) if key in self.config]
        values = [self.config[key] for key in keys if self.config[key] is not None]
        if len(values) > 1 and any(value != values[0] for value in values):
            raise self.fail(f"{' and '.join(keys)} contradict each other ({', '.join(map(str, values))})")
        if values:
            return values[0]
        return None if keys else _ABSENT

    def value(self, role: str) -> Any:
        raw = self.raw(role)
        return self.family.defaults.get(role) if raw is None or raw is _ABSENT else raw

    def key(self, role: str) -> str:
        return next((key for key in self.keys[role] if key in self.config), self.keys[role][0])

    def whole(self, role: str, least: int = 1, most: int | None = None) -> int:
        value = self.value(role)
        most = LIMITS.get(role, LIMITS["expert_ffn"]) if most is None else most
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(f"{self.key(role)} is {value!r:.40}, not a whole number in {least}..{most}")
        return value

    def flag(self, role: str) -> bool:
        value = self.value(role)
        if not isinstance(value, bool):
            raise self.fail(f"{self.key(role)} is {value!r:.40}, not true or false")
        return value

    def number(self, role: str) -> float:
        value = self.value(role)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(f"{self.key(role)} is {value!r:.40}, not a number")
        return float(value)


def find_family(config: dict[str, Any], source: str) -> str:
    """Name of the family by model_type, else by architectures.

    ModelError: dense models, and the list of known families.
    """
    kind = config.get("model_type")
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if not isinstance(kind, str):
        kind = next((k for k, family in FAMILIES.items() if family.architecture in names), None)
    if kind in FAMILIES:
        return str(kind)
    shown = str(kind or (names[0] if names else "none stated"))[:60]
    known = ", ".join(sorted(FAMILIES))
    if "hidden_size" in config and not any("expert" in key and config[key] for key in config):
        raise ModelError(
            f"{source}: {shown!r} is a dense model (no experts); this engine runs mixtures of experts: {known}"
        )
    raise ModelError(f"{source}: architecture {shown!r} is not known; known are {known}")


def read_spec(config: dict[str, Any], source: str, generation: dict[str, Any] | None = None) -> ModelSpec:
    """Facts from a config.json (and generation_config.json for the end tokens); `source` names the file in errors."""
    name = find_family(config, source)
    family = FAMILIES[name]
    facts = _Facts(config, family, source)
    experts = facts.value("experts")
    if experts == 0 and not isinstance(experts, bool):
        raise facts.fail(f"{facts.key('experts')} is 0: a dense model, which this engine does not run")
    if facts.value("activation") not in ("silu", "swish"):
        raise facts.fail(f"hidden_act {facts.value('activation')!r:.40} is not supported: only silu")
    layers, heads, hidden = facts.whole("layers"), facts.whole("heads"), facts.whole("hidden_size")
    kv_null = facts.raw("kv_heads") is None or facts.value("kv_heads") is None
    head_dim_null = facts.raw("head_dim") in (None, _ABSENT)
    if head_dim_null and hidden % heads:
        raise facts.fail(f"hidden_size {hidden} is no multiple of {heads} heads and there is no head_dim")
    head_dim = hidden // heads if head_dim_null else facts.whole("head_dim")
    sparse = _sparse(facts, layers)
    spec = ModelSpec(
        family=name,
        vocab_size=facts.whole("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if kv_null else facts.whole("kv_heads"),
        head_dim=head_dim,
        max_positions=facts.whole("max_positions"),
        norm_eps=facts.number("norm_eps"),
        rope=read_rope(config, family.theta, head_dim, facts.whole("max_positions"), source),
        experts=facts.whole("experts"),
        top_k=facts.whole("top_k"),
        normalise_top_k=facts.flag("normalise_top_k"),
        expert_ffn=facts.whole("expert_ffn"),
        sparse=sparse,
        window=_windows(facts, layers),
        dense_ffn=0 if all(sparse) else facts.whole("dense_ffn"),
        shared_ffn=facts.whole("shared_ffn", least=0) if "shared_ffn" in family.keys else 0,
        qkv_bias=facts.flag("qkv_bias") if "qkv_bias" in family.keys else False,
        o_bias=facts.flag("o_bias") if "o_bias" in family.keys else False,
        qk_norm=family.qk_norm,
        clip_qkv=None if facts.raw("clip_qkv") in (None, _ABSENT) else facts.number("clip_qkv"),
        tied=facts.flag("tied"),
    )
    spec = replace(spec, bos=_bos(facts, spec.vocab_size), eos=_eos(facts, spec.vocab_size, generation or {}))
    check_spec(spec, source)
    return spec


def _sparse(facts: _Facts, layers: int) -> tuple[bool, ...]:
    """Layer i is sparse unless listed as dense or (i + 1) is no multiple of the step."""
    if "sparse_step" not in facts.keys:
        return (True,) * layers
    step = facts.whole("sparse_step")
    dense = facts.value("dense_layers")
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise facts.fail("mlp_only_layers is not a list of layer numbers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _windows(facts: _Facts, layers: int) -> tuple[int, ...]:
    """Sliding window of each layer, 0 where a token sees all before it."""
    kind, config = facts.family.windows, facts.config
    if kind == "none":
        return (0,) * layers
    default = None if kind == "all" else 4096
    size = config.get("sliding_window", default)
    if size is not None and (
        isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= LIMITS["max_positions"]
    ):
        raise facts.fail(f"sliding_window is {size!r:.40}, not a number of tokens")
    used = kind == "all" or config.get("use_sliding_window") or False
    if not isinstance(used, bool):
        raise facts.fail(f"use_sliding_window is {used!r:.40}, not true or false")
    window = (size or 0) if used else 0
    if kind != "layers":
        return (window,) * layers
    types = config.get("layer_types")
    if types is None:  # every other layer, from the first, below max_window_layers
        below = config.get("max_window_layers")
        below = 28 if below is None else below
        if isinstance(below, bool) or not isinstance(below, int):
            raise facts.fail(f"max_window_layers is {below!r:.40}, not a number of layers")
        return tuple(window if i % 2 == 0 and i < below else 0 for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise facts.fail(f"layer_types is not a list of {layers} entries")
    if bad := [t for t in types if t not in ("full_attention", "sliding_attention")]:
        raise facts.fail(f"layer_types holds {bad[0]!r:.40}: only full_attention and sliding_attention are supported")
    if "sliding_attention" in types and not window:
        raise facts.fail("layer_types asks for sliding_attention but use_sliding_window or sliding_window turns it off")
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _bos(facts: _Facts, vocab: int) -> int | None:
    raw = facts.raw("bos")
    ids = _ids(facts.family.defaults["bos"] if raw is _ABSENT else raw, facts.source, "bos_token_id")
    return next((token for token in ids if token < vocab), None)


def _eos(facts: _Facts, vocab: int, generation: dict[str, Any]) -> tuple[int, ...]:
    """End tokens of generation_config.json first, then those of config.json, each once."""
    raw = facts.raw("eos")
    own = facts.family.defaults["eos"] if raw is _ABSENT else raw
    ids = _ids(generation.get("eos_token_id"), "generation_config.json", "eos_token_id")
    if raw is not _ABSENT or not ids:
        ids += _ids(own, facts.source, "eos_token_id")
    return tuple(dict.fromkeys(token for token in ids if token < vocab))


def _ids(value: Any, source: str, key: str) -> list[int]:
    """Token ids from null, a number or a list; -1 means none, as older configs have it."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, (int, type(None))) for item in items) or len(items) > 1000:
        raise ModelError(f"{source}: {key} is {value!r:.40}, not a token id or a list of them")
    return [item for item in items if item is not None and item >= 0]
