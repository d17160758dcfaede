"""A float64 forward of the four families, straight from config.json and Hugging Face tensors; nothing of colibri_lab.

Written for reading: whole sequences, no cache, one loop per token and expert. `wrong` names misreadings that a
converter or an engine could make; a test that cannot tell them from the right reading proves nothing.

Shape legend: T tokens, H hidden, N heads, M KV heads, D head_dim, E experts, k top-k, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

WRONG = frozenset(
    {
        "renormalise",  # the other answer to "do the chosen weights sum to one?"
        "equal_weights",  # gate weights ignored
        "no_window",
        "window_plus_one",
        "window_minus_one",
        "window_all_layers",
        "no_bias",
        "no_o_bias",
        "sparse_from_zero",  # i % step in place of (i + 1) % step
        "no_rope",
        "no_rope_scaling",
        "formula_attention_factor",  # YaRN's formula over the stated factor
        "theta_10000",
        "interleaved_rope",
        "quotient_scale",  # 1 / sqrt(hidden / heads) though head_dim is stated
        "kv_tiled",  # query head h reads KV head h % M
        "no_qk_norm",
        "norm_per_head",
        "no_clip",
        "clip_after_rope",
        "clip_no_v",
        "no_shared",
        "no_shared_gate",
        "eps_1e-5",
    }
)


@dataclass
class Routing:
    """Chosen experts, gate weights and router logits of each sparse layer, in order."""

    layer: list[int] = field(default_factory=list)
    experts: list[NDArray[np.int64]] = field(default_factory=list)  # [T, k]
    weights: list[F64] = field(default_factory=list)  # [T, k]
    logits: list[F64] = field(default_factory=list)  # [T, E]

    def margin(self) -> float:
        """The least gap between the last chosen and the first rejected router logit."""
        gaps = []
        for logits, experts in zip(self.logits, self.experts, strict=True):
            k = experts.shape[1]
            if k < logits.shape[1]:
                ranked = -np.sort(-logits, axis=1)
                gaps.append((ranked[:, k - 1] - ranked[:, k]).min())
        return float(min(gaps, default=math.inf))


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


class Oracle:
    """One checkpoint's forward. `wrong`: names out of WRONG."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, NDArray[Any]], wrong: frozenset[str] | set[str] = frozenset()
    ) -> None:
        unknown = set(wrong) - WRONG
        if unknown:
            raise ValueError(f"no such misreading: {sorted(unknown)}")
        self.config, self.wrong = config, frozenset(wrong)
        self.w = {name: np.asarray(t, np.float64) for name, t in tensors.items()}
        self.family = config["model_type"]
        self.hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        absent = {"mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4, "olmoe": None}[self.family]
        self.kv_heads = config.get("num_key_value_heads", absent) or self.heads
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.eps = 1e-5 if "eps_1e-5" in wrong else config["rms_norm_eps"]
        self.top_k = config["num_experts_per_tok"]
        normalise = True if self.family == "mixtral" else bool(config.get("norm_topk_prob", False))
        self.normalise = normalise != ("renormalise" in wrong)
        self.inv_freq, self.rope_factor = self._rope()

    # ---- facts ----
    def _rope(self) -> tuple[F64, float]:
        config, d = self.config, self.head_dim
        stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
        theta = stated.get("rope_theta") or config.get("rope_theta") or (1e6 if self.family == "mixtral" else 1e4)
        if "theta_10000" in self.wrong:
            theta = 1e4
        kind = stated.get("rope_type", stated.get("type", "default"))
        plain = 1.0 / theta ** (np.arange(0, d, 2) / d)  # [D / 2]
        if kind == "default" or "no_rope_scaling" in self.wrong:
            return plain, 1.0
        factor = stated["factor"]
        if kind == "linear":
            return plain / factor, 1.0
        assert kind == "yarn", kind
        original = stated.get("original_max_position_embeddings") or config["max_position_embeddings"]
        attention = stated.get("attention_factor")
        if attention is None or "formula_attention_factor" in self.wrong:
            attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0

        def dimension_of(turns: float) -> float:  # which dimension turns so often over the original context
            return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension_of(stated.get("beta_fast") or 32), dimension_of(stated.get("beta_slow") or 1)
        if stated.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        if low == high:
            high += 0.001
        slow = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)  # 0: keep, 1: stretch by the factor
        return plain / factor * slow + plain * (1 - slow), float(attention)

    def _window(self, layer: int) -> int:
        config = self.config
        if "no_window" in self.wrong:
            return 0
        if self.family == "mixtral":
            window = config.get("sliding_window") or 0
        elif self.family == "olmoe" or not config.get("use_sliding_window", False):
            window = 0
        elif self.family == "qwen3_moe" or "window_all_layers" in self.wrong:
            window = config.get("sliding_window", 4096) or 0
        else:  # qwen2_moe: every second layer below max_window_layers
            slides = (layer + 1) % 2 and layer < config.get("max_window_layers", 28)
            types = config.get("layer_types")
            slides = types[layer] == "sliding_attention" if types else slides
            window = config.get("sliding_window", 4096) if slides else 0
        return window + ("window_plus_one" in self.wrong) - ("window_minus_one" in self.wrong) if window else 0

    def _sparse(self, layer: int) -> bool:
        if self.family not in ("qwen2_moe", "qwen3_moe"):
            return True
        step = self.config.get("decoder_sparse_step", 1) or 1
        at = layer if "sparse_from_zero" in self.wrong else layer + 1
        return layer not in (self.config.get("mlp_only_layers") or []) and at % step == 0

    # ---- parts ----
    def _linear(self, name: str, x: F64, bias: bool = True) -> F64:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if bias and f"{name}.bias" in self.w else y

    def _norm(self, x: F64, weight: F64) -> F64:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def _rotate(self, x: F64) -> F64:  # [T, heads, D]
        if "no_rope" in self.wrong:
            return x
        angle = np.arange(x.shape[0])[:, None] * self.inv_freq  # [T, D / 2]
        cos, sin = (np.cos(angle) * self.rope_factor)[:, None], (np.sin(angle) * self.rope_factor)[:, None]
        if "interleaved_rope" in self.wrong:
            a, b = x[..., 0::2], x[..., 1::2]
            return np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def _qk_norm(self, name: str, x: F64, heads: int) -> F64:  # [T, heads * D]
        weight = self.w.get(f"{name}.weight")
        if weight is None or "no_qk_norm" in self.wrong:
            return x
        split = x.reshape(x.shape[0], heads, self.head_dim)
        if weight.size == self.head_dim:
            return self._norm(split, weight).reshape(x.shape)
        if "norm_per_head" in self.wrong:
            return self._norm(split, weight.reshape(heads, self.head_dim)).reshape(x.shape)
        return self._norm(x, weight)

    def _attention(self, layer: int, x: F64) -> F64:
        name, n, m, d = f"model.layers.{layer}.self_attn", self.heads, self.kv_heads, self.head_dim
        t, bias, clip = x.shape[0], "no_bias" not in self.wrong, self.config.get("clip_qkv")
        q = self._qk_norm(f"{name}.q_norm", self._linear(f"{name}.q_proj", x, bias), n)
        k = self._qk_norm(f"{name}.k_norm", self._linear(f"{name}.k_proj", x, bias), m)
        v = self._linear(f"{name}.v_proj", x, bias)
        late = "clip_after_rope" in self.wrong
        if clip is not None and "no_clip" not in self.wrong:
            v = v if "clip_no_v" in self.wrong else np.clip(v, -clip, clip)
            q, k = (q, k) if late else (np.clip(q, -clip, clip), np.clip(k, -clip, clip))
        q, k = self._rotate(q.reshape(t, n, d)), self._rotate(k.reshape(t, m, d))
        if clip is not None and late:
            q, k = np.clip(q, -clip, clip), np.clip(k, -clip, clip)
        group = np.arange(n) % m if "kv_tiled" in self.wrong else np.arange(n) // (n // m)
        k, v = k[:, group], v.reshape(t, m, d)[:, group]  # [T, N, D]
        scale = (self.hidden // n if "quotient_scale" in self.wrong else d) ** -0.5
        scores = np.einsum("tnd,snd->nts", q, k) * scale
        back = np.arange(t)[:, None] - np.arange(t)  # [T, T] how far back
        window = self._window(layer)
        seen = (back >= 0) & ((back < window) if window else True)
        out = np.einsum("nts,snd->tnd", softmax(np.where(seen, scores, -np.inf)), v)
        return self._linear(f"{name}.o_proj", out.reshape(t, n * d), "no_o_bias" not in self.wrong)

    def _swiglu(self, name: str, x: F64) -> F64:
        gate, up, down = ("w1", "w3", "w2") if f"{name}.w1.weight" in self.w else ("gate_proj", "up_proj", "down_proj")
        return self._linear(f"{name}.{down}", silu(self._linear(f"{name}.{gate}", x)) * self._linear(f"{name}.{up}", x))

    def _moe(self, layer: int, x: F64, routing: Routing) -> F64:
        name = f"model.layers.{layer}." + ("block_sparse_moe" if self.family == "mixtral" else "mlp")
        logits = self._linear(f"{name}.gate", x)  # [T, E]
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, : self.top_k]  # ties to the lower index
        weights = np.take_along_axis(softmax(logits), chosen, 1)
        if self.normalise:
            weights = weights / weights.sum(1, keepdims=True)
        if "equal_weights" in self.wrong:
            weights = np.full_like(weights, 1 / self.top_k)
        routing.layer.append(layer)
        routing.experts.append(chosen)
        routing.weights.append(weights)
        routing.logits.append(logits)
        out = np.zeros_like(x)
        for t in range(x.shape[0]):
            for expert, weight in zip(chosen[t], weights[t], strict=True):
                out[t] += weight * self._swiglu(f"{name}.experts.{expert}", x[t])
        if f"{name}.shared_expert.gate_proj.weight" in self.w and "no_shared" not in self.wrong:
            gate = 1 / (1 + np.exp(-self._linear(f"{name}.shared_expert_gate", x)))  # [T, 1]
            out += (1.0 if "no_shared_gate" in self.wrong else gate) * self._swiglu(f"{name}.shared_expert", x)
        return out

    # ---- whole ----
    def forward(self, ids: Any) -> tuple[F64, Routing]:
        """Logits [T, V] of each position and the routing."""
        routing = Routing()
        x = self.w["model.embed_tokens.weight"][np.asarray(ids, np.int64)]  # [T, H]
        for i in range(self.config["num_hidden_layers"]):
            x = x + self._attention(i, self._norm(x, self.w[f"model.layers.{i}.input_layernorm.weight"]))
            h = self._norm(x, self.w[f"model.layers.{i}.post_attention_layernorm.weight"])
            sparse_there = f"model.layers.{i}.mlp.gate_proj.weight" not in self.w  # what the tensors allow
            x = x + (self._moe(i, h, routing) if self._sparse(i) and sparse_there else self._dense(i, h))
        x = self._norm(x, self.w["model.norm.weight"])
        return x @ self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"]).T, routing

    def _dense(self, layer: int, h: F64) -> F64:
        name = f"model.layers.{layer}.mlp"
        return self._swiglu(name, h) if f"{name}.gate_proj.weight" in self.w else np.zeros_like(h)

    def logits(self, ids: Any) -> F64:
        return self.forward(ids)[0]

    def greedy(self, ids: Any, count: int) -> tuple[list[int], float, float]:
        """(tokens, least margin of first over second logit relative to the largest logit, least routing margin)."""
        ids, margin, routed = list(ids), math.inf, math.inf
        start = len(ids)
        for _ in range(count):
            logits, routing = self.forward(ids)
            second, first = np.sort(logits[-1])[-2:]
            margin = min(margin, float((first - second) / np.abs(logits[-1]).max()))
            routed = min(routed, routing.margin())
            ids.append(int(logits[-1].argmax()))
        return ids[start:], margin, routed
