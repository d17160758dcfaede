"""What a model is: the facts that the engine needs, read from config.json through one table of families."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ModelError

F32 = NDArray[np.float32]

ROPE_KINDS = ("default", "linear", "yarn")
# The largest value that a fact may have: far above any model, and low enough that no product of two overflows or
# fills memory.
LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_positions": 1 << 24,
    "experts": 1 << 14,
    "top_k": 1 << 10,
    "expert_ffn": 1 << 20,
}
ROPE_LIMITS = {
    "theta": (1.001, 1e15),
    "factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. kind: default | linear | yarn (others are refused). attention_factor scales cos and sin."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """Architecture facts of one model; widths are before any padding."""

    family: str  # mixtral | qwen2_moe | qwen3_moe | olmoe
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    experts: int
    top_k: int
    normalise_top_k: bool
    expert_ffn: int
    sparse: tuple[bool, ...]  # per layer
    window: tuple[int, ...]  # per layer, 0 = full attention
    dense_ffn: int = 0  # width of the layers that are not sparse
    shared_ffn: int = 0  # width of the shared expert, 0 = none
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""  # "" | head | flat
    clip_qkv: float | None = None
    tied: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def q_rows(self) -> int:
        """Outputs of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have routed experts."""
        return tuple(i for i, sparse in enumerate(self.sparse) if sparse)

    def to_json(self) -> dict[str, Any]:
        """A dict that strict JSON can hold; `from_json` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, source: str = "spec") -> ModelSpec:
        """The spec that `to_json` gave. ModelError for anything else: types, ranges and sums are all checked."""
        rope = _build(Rope, data.get("rope") if isinstance(data, dict) else None, f"{source}: rope")
        spec: ModelSpec = _build(cls, {**data, "rope": None} if isinstance(data, dict) else data, source)
        spec = dataclasses.replace(spec, rope=rope)
        check_spec(spec, source)
        return spec


def check_spec(spec: ModelSpec, source: str) -> None:
    """ModelError, naming `source` and the fact, unless the facts are in range and agree with each other."""

    def need(good: bool, message: str) -> None:
        if not good:
            raise ModelError(f"{source}: {message}")

    for name, most in LIMITS.items():
        value = getattr(spec, name)
        need(1 <= value <= most, f"{name} is {value}, not in 1..{most}")
    for name in ("dense_ffn", "shared_ffn"):
        value = getattr(spec, name)
        need(0 <= value <= LIMITS["expert_ffn"], f"{name} is {value}, not in 0..{LIMITS['expert_ffn']}")
    need(spec.heads % spec.kv_heads == 0, f"{spec.heads} attention heads cannot share {spec.kv_heads} key/value heads")
    need(spec.head_dim % 2 == 0, f"head_dim {spec.head_dim} is odd: rotary embedding turns pairs")
    need(spec.top_k <= spec.experts, f"{spec.top_k} experts per token of only {spec.experts} experts")
    need(len(spec.sparse) == spec.layers, f"sparse has {len(spec.sparse)} entries for {spec.layers} layers")
    need(len(spec.window) == spec.layers, f"window has {len(spec.window)} entries for {spec.layers} layers")
    need(any(spec.sparse), "no layer has routed experts: a dense model, which this engine does not run")
    need(all(spec.sparse) or spec.dense_ffn > 0, "has dense layers but no width for them (intermediate_size)")
    need(all(0 <= w <= LIMITS["max_positions"] for w in spec.window), "a sliding window is negative or too large")
    need(0 < spec.norm_eps < 1, f"norm_eps {spec.norm_eps} is not between 0 and 1")
    need(spec.qk_norm in ("", "head", "flat"), f"qk_norm {spec.qk_norm!r} is none of '', 'head', 'flat'")
    clip = spec.clip_qkv
    need(clip is None or (math.isfinite(clip) and clip > 0), f"clip_qkv {clip} is not a positive number")
    need(spec.bos is None or spec.bos >= 0, f"bos {spec.bos} is negative")
    need(all(token >= 0 for token in spec.eos), f"eos {spec.eos} holds a negative id")
    _check_rope(spec.rope, need)


def _check_rope(rope: Rope, need: Any) -> None:
    need(rope.kind in ROPE_KINDS, f"rope type {rope.kind!r} is not supported: only {', '.join(ROPE_KINDS)}")
    for name, (least, most) in ROPE_LIMITS.items():
        value = getattr(rope, name)
        need(least <= value <= most, f"rope {name} is {value}, not in {least:g}..{most:g}")
    if rope.kind == "yarn":
        need(
            1 <= rope.original_positions <= LIMITS["max_positions"], "rope yarn needs original_max_position_embeddings"
        )


def _build(cls: type[Any], data: Any, source: str) -> Any:
    """A dataclass from a dict of its fields, each of the annotated type."""
    if not isinstance(data, dict):
        raise ModelError(f"{source}: is not an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - set(fields)):
        raise ModelError(f"{source}: unknown fact {unknown[0]!r}: written by a newer version? convert the model again")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                raise ModelError(f"{source}: lacks {name}")
            continue
        values[name] = _typed(data[name], str(field.type), f"{source}: {name}")
    return cls(**values)


def _typed(value: Any, kind: str, source: str) -> Any:
    if (kind.endswith(" | None") and value is None) or kind == "Rope":
        return value
    kind = kind.removesuffix(" | None")
    if kind.startswith("tuple["):
        if not isinstance(value, (list, tuple)) or len(value) > LIMITS["layers"]:
            raise ModelError(f"{source} is not a list of {kind}")
        return tuple(_typed(item, kind.removeprefix("tuple[").split(",")[0], source) for item in value)
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 53 else math.inf
    wanted = {"int": int, "float": float, "bool": bool, "str": str}[kind]
    if type(value) is not wanted:
        raise ModelError(f"{source} is {value!r:.40}, not {kind}")
    return value


def rope_tables(spec: ModelSpec) -> tuple[F32, F32]:
    """cos, sin float32 [P, D/2] for all positions.

    Float32 frequencies times the position, as transformers computes them.
    """
    rope, dim = spec.rope, spec.head_dim
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # float32 powers, rounded once: within one unit in the last place of any library's own float32 pow
    wavelength = np.power(rope.theta, exponent.astype(np.float64)).astype(np.float32)  # [D/2]
    frequency = np.float32(1.0) / wavelength
    if rope.kind == "linear":
        frequency = frequency / np.float32(rope.factor)
    elif rope.kind == "yarn":
        frequency = _yarn(rope, dim, wavelength)
    position = np.arange(spec.max_positions, dtype=np.float32)
    angle = position[:, None] * frequency.astype(np.float32)[None, :]  # float32 [P, D/2]
    factor = np.float32(rope.attention_factor)
    return np.cos(angle) * factor, np.sin(angle) * factor


def _yarn(rope: Rope, dim: int, wavelength: F32) -> F32:
    """YaRN's mix of stretched and plain frequencies (arXiv 2309.00071, section 3.2).

    Slow turns stretch, fast ones stay.
    """

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, 0, 1)
    plain = np.float32(1.0) / wavelength
    stretched = np.float32(1.0) / (np.float32(rope.factor) * wavelength)
    mixed: F32 = (stretched * (np.float32(1.0) - keep) + plain * keep).astype(np.float32)
    return mixed
