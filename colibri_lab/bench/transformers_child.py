"""transformers beside us: the same random weights as a bf16 Qwen3-MoE, in a child process that has torch.

It runs in the interpreter that has torch and transformers, which need not be ours. Requests: load, close, and the
public methods of `Model`. An ISA level is told to torch's libraries by the environment (`peer_level.py`); here they are
asked whether they took it, and after each answer the system is.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from colibri_lab.bench import peer_level
from colibri_lab.bench.harness import run_queue_delay
from colibri_lab.bench.peer_child import child
from colibri_lab.bench.shapes import Role, Shape, draw, draw_router

Times = tuple[float, float, float]
WARM = 64  # tokens of a first prompt, which nobody times


class Model:
    """A shape's weights in bf16 on the CPU, with transformers' defaults for the rest.

    RuntimeError where torch or a library of it is not held to `isa` as the environment says.
    """

    def __init__(self, shape: dict[str, Any], seed: int, threads: int, isa: str | None = None) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
        import torch
        import transformers
        from transformers.initialization import no_init_weights

        torch.set_num_threads(threads)
        said = peer_level.ask(torch)
        peer_level.check(isa, said)
        self.torch, self.past, self.isa = torch, None, isa
        with no_init_weights():
            self.model = transformers.Qwen3MoeForCausalLM(_config(Shape(**shape))).to(torch.bfloat16).eval()
        self._fill(Shape(**shape), seed)
        how = getattr(self.model.config, "_experts_implementation", "eager")
        kind = getattr(self.model.config, "_attn_implementation", "eager")
        self.settings = f"transformers {transformers.__version__}, torch {torch.__version__}, bf16, threads {threads}, "
        self._forward([0] * min(WARM, shape["positions"]))  # whoever wants AMX has asked for it after this
        peer_level.check_tiles(isa)
        self.settings += f"attention {kind}, experts {how}, {said}, AMX {'in use' if peer_level.tiles() else 'unused'}"

    def _fill(self, shape: Shape, seed: int) -> None:
        named = dict(self.model.named_parameters())

        def put(name: str, *matrices: np.ndarray[Any, Any], at: Any = ...) -> None:
            values = self.torch.from_numpy(np.concatenate(matrices))
            named[name].data[at] = values.to(named[name].dtype)

        def matrix(role: Role, layer: int = 0, expert: int = 0) -> np.ndarray[Any, Any]:
            return draw(shape, role, layer, expert, seed).values()

        for name, parameter in named.items():
            if name.endswith("norm.weight"):
                parameter.data.fill_(1)
        put("model.embed_tokens.weight", matrix(Role.EMBEDDING))
        put("lm_head.weight", matrix(Role.HEAD))
        for layer in range(shape.layers):
            at = f"model.layers.{layer}"
            for name, role in (("q", Role.Q), ("k", Role.K), ("v", Role.V), ("o", Role.O)):
                put(f"{at}.self_attn.{name}_proj.weight", matrix(role, layer))
            put(f"{at}.mlp.gate.weight", draw_router(shape, layer, seed))
            for e in range(shape.experts):
                put(f"{at}.mlp.experts.gate_up_proj", matrix(Role.GATE, layer, e), matrix(Role.UP, layer, e), at=e)
                put(f"{at}.mlp.experts.down_proj", matrix(Role.DOWN, layer, e), at=e)

    def timed(self, tokens: list[int]) -> Times:
        """(wall, CPU, run-queue delay) seconds of one forward call after what there is."""
        delay, cpu, wall = run_queue_delay(), time.process_time(), time.perf_counter()
        self._forward(tokens)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall, cpu, run_queue_delay() - delay

    def _forward(self, tokens: list[int]) -> Any:
        with self.torch.inference_mode():
            ids = self.torch.tensor([tokens])
            found = self.model(ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)
            self.past = found.past_key_values
            return found.logits[0, -1]

    def decode(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """The prompt at once, then `tokens` one by one; seconds of each."""
        self.past = None
        found = {"prompt": self.timed(prompt), "steps": [self.timed([token]) for token in tokens]}
        peer_level.check_tiles(self.isa)
        return found

    def logits(self, tokens: list[int], path: str) -> dict[str, Any]:
        """float32 [V] after the last token, saved as .npy."""
        self.past = None
        np.save(path, self._forward(tokens).float().numpy())
        peer_level.check_tiles(self.isa)
        return {"path": path}


def _config(shape: Shape) -> Any:
    import transformers

    return transformers.Qwen3MoeConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_experts=shape.experts,
        num_experts_per_tok=shape.top_k, moe_intermediate_size=shape.ffn, intermediate_size=shape.ffn,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.positions, rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip


def main() -> None:
    child(Model, {})
