"""Which tiny checkpoints have goldens: each family with the settings that readers get wrong, and the misreadings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.makers import ABSENT, Checkpoint, make

WINDOW = 8


@dataclass(frozen=True)
class Setting:
    """family: overrides of the base config. wrong: misreadings that must change the logits by more than 1e-2.

    lengths: of the prompts. shown: config keys that our converter sees and transformers cannot take.
    """

    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (20,)
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.family}-{self.name}"

    def checkpoint(self, seed: int) -> Checkpoint:
        """The checkpoint as transformers reads it."""
        return make(self.family, seed, **self.overrides)

    def for_us(self, seed: int) -> Checkpoint:
        """The checkpoint as our converter gets it."""
        return self.checkpoint(seed).with_config(**self.shown)


ROPE = ("no_rope", "interleaved_rope")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
A1 = {
    "num_hidden_layers": 6,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
}
EDGE = (WINDOW - 1, WINDOW, WINDOW + 1, 20)
SLIDING = ("no_window", "window_plus_one", "window_minus_one")
ODD = {"hidden_size": 40, "vocab_size": 61}


def _settings() -> list[Setting]:
    s = Setting
    both = [
        s("base", "mixtral", {}, ("renormalise", "equal_weights", "kv_tiled", *ROPE)),
        s("base", "qwen2_moe", {}, ("renormalise", "no_bias", "no_shared", "no_shared_gate", "kv_tiled", *ROPE)),
        s("base", "qwen3_moe", {}, ("renormalise", "no_qk_norm", "kv_tiled", *ROPE)),
        s("base", "olmoe", {}, ("renormalise", "no_qk_norm", "norm_per_head", "kv_tiled", *ROPE)),
    ]
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"):
        experts = "num_local_experts" if family == "mixtral" else "num_experts"
        absent_theta = ("theta_10000",) if family == "mixtral" else ()
        both += [
            s("k1", family, {"num_experts_per_tok": 1}, ("renormalise",)),
            s("experts3", family, {experts: 3}, ("renormalise",)),
            s("experts7", family, {experts: 7, "num_experts_per_tok": 3}, ("renormalise",)),
            s("experts60", family, {experts: 60, "num_experts_per_tok": 4}, ("renormalise",)),
            s("tied", family, {"tie_word_embeddings": True}),
            s("mha", family, {"num_key_value_heads": 4}),
            s("mqa", family, {"num_key_value_heads": 1}),
            s("linear", family, {"rope_scaling": {"type": "linear", "factor": 4.0}}, ("no_rope_scaling",), (40,)),
            s("theta_absent", family, {"rope_theta": ABSENT}, absent_theta, (40,)),
            s("eps", family, {"rms_norm_eps": 0.05}, ("eps_1e-5",)),
        ]
        if family != "mixtral":
            both += [
                s("norm_false", family, {"norm_topk_prob": False}, ("renormalise",)),
                s("norm_true", family, {"norm_topk_prob": True}, ("renormalise",)),
                s("norm_absent", family, {"norm_topk_prob": ABSENT}, ("renormalise",)),
                s("k1_norm", family, {"num_experts_per_tok": 1, "norm_topk_prob": True}, ("renormalise",)),
            ]
        if family != "olmoe":  # OLMoE's flat norms are hidden wide whatever head_dim says
            both.append(s("head_dim", family, {"head_dim": 16}, ("quotient_scale",)))
        if family in ("qwen2_moe", "qwen3_moe"):
            both += [
                s("dense", family, A1, ("sparse_from_zero",)),
                s("odd", family, {**ODD, "moe_intermediate_size": 25}),
                s(
                    "nulls",
                    family,
                    {"mlp_only_layers": None},
                    shown={"head_dim": None, "sliding_window": None, "rope_scaling": None},
                ),
            ]
        else:
            both.append(s("odd", family, {**ODD, "intermediate_size": 25}))
    slide = {"use_sliding_window": True, "sliding_window": WINDOW}
    both += [
        s("window", "mixtral", {"sliding_window": WINDOW}, SLIDING, EDGE),
        s(
            "window",
            "qwen2_moe",
            {**slide, "max_window_layers": 3, "num_hidden_layers": 4},
            (*SLIDING, "window_all_layers"),
            EDGE,
        ),
        s("window", "qwen3_moe", slide, SLIDING, EDGE),
        s("window_off", "qwen2_moe", {"use_sliding_window": False, "sliding_window": WINDOW}),
        s("window_off", "qwen3_moe", {"use_sliding_window": False, "sliding_window": WINDOW}),
        s(
            "yarn_stated",
            "mixtral",
            {"head_dim": 8, "rope_scaling": {**YARN, "attention_factor": 1.0}},
            ("no_rope_scaling", "formula_attention_factor"),
            (40,),
        ),
        s("yarn", "qwen2_moe", {"rope_scaling": YARN}, ("no_rope_scaling",), (40,)),
        s(
            "yarn",
            "qwen3_moe",
            {"rope_parameters": {**YARN, "rope_theta": 10000.0}, "rope_theta": ABSENT},
            ("no_rope_scaling",),
            (40,),
        ),
        s(
            "yarn_betas",
            "olmoe",
            {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}},
            ("no_rope_scaling",),
            (40,),
        ),
        s("nulls", "mixtral", {"head_dim": None, "sliding_window": None, "rope_scaling": None}),
        s("kv_null", "mixtral", {"num_key_value_heads": 4}, shown={"num_key_value_heads": None}),
        s("kv_null", "olmoe", {"num_key_value_heads": None}),
        s("kv_absent", "olmoe", {"num_key_value_heads": ABSENT}),
        s("kv_absent", "qwen3_moe", {"num_key_value_heads": ABSENT}),
        s("no_bias", "qwen2_moe", {"qkv_bias": False}),
        s("bias", "qwen3_moe", {"attention_bias": True}, ("no_bias", "no_o_bias")),
        s("bias", "olmoe", {"attention_bias": True}, ("no_bias", "no_o_bias")),
        s("clip", "olmoe", {"clip_qkv": 0.5}, ("no_clip", "clip_after_rope", "clip_no_v", "norm_per_head")),
        s("shared_wide", "qwen2_moe", {"shared_expert_intermediate_size": 72}, ("no_shared", "no_shared_gate")),
    ]
    return both


SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _settings()}
