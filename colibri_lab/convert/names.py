"""Where a checkpoint keeps each part of a model: from the store's tensor names to the source's, by role and family."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.families import FAMILIES
from ..model.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Tensors that some exporters save and that config.json already says: safe to leave out, and the only ones that are.
SKIPPED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Part:
    """Rows [first, first + rows) of a source tensor; index.

    Which expert of a tensor that holds all experts of a layer.
    """

    tensor: str
    rows: int
    cols: int  # 0: a vector
    first: int = 0
    index: int | None = None


class Names:
    """Source names of one checkpoint; `present` are the tensors that it has, which decide between spellings."""

    def __init__(self, spec: ModelSpec, present: set[str] | frozenset[str]) -> None:
        self.spec, self.family, self.present = spec, FAMILIES[spec.family], present

    def block(self, layer: int) -> str:
        """Prefix of a layer's sparse block: the first known spelling whose router is there."""
        spellings = [f"model.layers.{layer}.{name}" for name in self.family.block]
        return next((s for s in spellings if f"{s}.gate.weight" in self.present), spellings[0])

    def expert(self, layer: int, expert: int) -> tuple[Part, Part, Part]:
        """gate, up, down of a routed expert: three tensors, or slices of two that hold all experts of the layer."""
        block, width, hidden = self.block(layer), self.spec.expert_ffn, self.spec.hidden_size
        fused = f"{block}.experts.gate_up_proj"
        if fused in self.present:  # [E, 2F, H] and [E, H, F]
            return (
                Part(fused, width, hidden, 0, expert),
                Part(fused, width, hidden, width, expert),
                Part(f"{block}.experts.down_proj", hidden, width, 0, expert),
            )
        gate, up, down = (f"{block}.experts.{expert}.{name}.weight" for name in self.family.expert)
        return Part(gate, width, hidden), Part(up, width, hidden), Part(down, hidden, width)

    def resident(self, name: str) -> tuple[Part, ...]:
        """Parts, one below the other, of a resident tensor by its name in the store (see model/plan.py)."""
        spec, hidden = self.spec, self.spec.hidden_size
        if name == "final_norm":
            return (Part("model.norm.weight", hidden, 0),)
        if name == "embedding":
            return (Part(EMBEDDING, spec.vocab_size, hidden),)
        if name == "head":
            tied = EMBEDDING if EMBEDDING in self.present else HEAD
            return (Part(tied if spec.tied else HEAD, spec.vocab_size, hidden),)
        _, index, role = name.split(".", 2)
        layer = f"model.layers.{index}"
        heads = (("q", spec.q_rows), ("k", spec.kv_rows), ("v", spec.kv_rows))
        if role == "attention.qkv":
            return tuple(Part(f"{layer}.self_attn.{letter}_proj.weight", rows, hidden) for letter, rows in heads)
        if role == "attention.qkv_bias":
            return tuple(Part(f"{layer}.self_attn.{letter}_proj.bias", rows, 0) for letter, rows in heads)
        if role == "router":
            return (Part(f"{self.block(int(index))}.gate.weight", spec.experts, hidden),)
        if role == "shared_gate":
            return (Part(f"{self.block(int(index))}.shared_expert_gate.weight", 1, hidden),)
        kind, _, part = role.partition(".")
        if kind in ("shared", "dense"):
            width = spec.shared_ffn if kind == "shared" else spec.dense_ffn
            prefix = f"{self.block(int(index))}.shared_expert" if kind == "shared" else f"{layer}.mlp"
            rows, cols = (hidden, width) if part == "down" else (width, hidden)
            return (Part(f"{prefix}.{part}_proj.weight", rows, cols),)
        flat = spec.qk_norm == "flat"
        source, rows, cols = {
            "input_norm": ("input_layernorm.weight", hidden, 0),
            "post_norm": ("post_attention_layernorm.weight", hidden, 0),
            "attention.o": ("self_attn.o_proj.weight", hidden, spec.q_rows),
            "attention.o_bias": ("self_attn.o_proj.bias", hidden, 0),
            "attention.q_norm": ("self_attn.q_norm.weight", spec.q_rows if flat else spec.head_dim, 0),
            "attention.k_norm": ("self_attn.k_norm.weight", spec.kv_rows if flat else spec.head_dim, 0),
        }[role]
        return (Part(f"{layer}.{source}", rows, cols),)

    def shape(self, part: Part) -> tuple[int, ...]:
        """The shape that the whole source tensor of a part must have."""
        if part.index is not None:
            rows = 2 * part.rows if part.tensor.endswith("gate_up_proj") else part.rows
            return (self.spec.experts, rows, part.cols)
        return (part.rows, part.cols) if part.cols else (part.rows,)
