"""llama.cpp beside us: a child process that answers one JSON line with one JSON line.

It runs in the interpreter that has llama-cpp-python and gguf, which need not be ours; it imports those, NumPy and
`shapes`, nothing else of the package. Requests: make, load, decode, logits, close.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench.harness import run_queue_delay
from colibri_lab.bench.shapes import Role, Shape, draw, draw_router

LAYER_MATRICES = {
    "attn_q": Role.Q,
    "attn_k": Role.K,
    "attn_v": Role.V,
    "attn_output": Role.O,
    "ffn_gate_exps": Role.GATE,
    "ffn_up_exps": Role.UP,
    "ffn_down_exps": Role.DOWN,
}


def tensors(shape: Shape, seed: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """(name, data) of every tensor: float32 as it is, Q4_0 as uint8 blocks."""

    def q4(role: Role, layer: int = 0) -> NDArray[np.uint8]:
        if role not in (Role.GATE, Role.UP, Role.DOWN):
            return draw(shape, role, layer, seed=seed).q4_0()
        return np.stack([draw(shape, role, layer, expert, seed).q4_0() for expert in range(shape.experts)])

    norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    yield "token_embd.weight", q4(Role.EMBEDDING)
    yield "output_norm.weight", np.ones(shape.hidden, np.float32)
    yield "output.weight", q4(Role.HEAD)
    for layer in range(shape.layers):
        for name, width in norms.items():
            yield f"blk.{layer}.{name}.weight", np.ones(width, np.float32)
        for name, role in LAYER_MATRICES.items():
            yield f"blk.{layer}.{name}.weight", q4(role, layer)
        yield f"blk.{layer}.ffn_gate_inp.weight", draw_router(shape, layer, seed)


def make(shape: Shape, seed: int, path: str) -> dict[str, Any]:
    """Write the shape's random weights as a qwen3moe GGUF without a tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(path + ".part", "qwen3moe")
    writer.add_name(f"random {shape.name}")
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.theta)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    for name, data in tensors(shape, seed):
        kind = gguf.GGMLQuantizationType.Q4_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path + ".part", path)
    return {"path": path, "bytes": Path(path).stat().st_size}


class Llama:
    """One model and one context through llama.cpp's C interface."""

    def __init__(self, path: str, threads: int, repack: bool, mmap: bool, context: int) -> None:
        import llama_cpp

        self.c = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.use_mmap = mmap
        model.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, 512, 512
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        built = re.findall(r"(\w+) = 1\b", llama_cpp.llama_print_system_info().decode())
        switches = f"repack {_on(repack)}, mmap {_on(mmap)}, threads {threads}"
        self.settings = f"llama-cpp-python {llama_cpp.__version__}, {switches}, built with {' '.join(built)}"

    def forward(self, tokens: list[int]) -> None:
        ids = (self.c.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = self.c.llama_batch_get_one(ids, len(tokens))
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.c.llama_synchronize(self.context)

    def timed(self, tokens: list[int]) -> tuple[float, float, float]:
        """(wall, CPU, run-queue delay) seconds of one forward call."""
        delay, cpu, wall = run_queue_delay(), time.process_time(), time.perf_counter()
        self.forward(tokens)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall, cpu, run_queue_delay() - delay

    def decode(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """The prompt at once, then `tokens` one by one; seconds of each."""
        self.c.llama_memory_clear(self.memory, True)
        return {"prompt": self.timed(prompt), "steps": [self.timed([token]) for token in tokens]}

    def logits(self, tokens: list[int], path: str) -> dict[str, Any]:
        """float32 [V] after the last token, saved as .npy."""
        self.c.llama_memory_clear(self.memory, True)
        self.forward(tokens)
        found = self.c.llama_get_logits_ith(self.context, -1)
        np.save(path, np.ctypeslib.as_array(found, shape=(self.vocab,)))
        return {"path": path}


def _on(value: bool) -> str:
    return "on" if value else "off"


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until `close` or the end of input; an error becomes {"error": text}."""
    loaded: Llama | None = None
    for line in requests:
        request = json.loads(line)
        what = request.pop("op")
        answer: dict[str, Any]
        try:
            if what == "close":
                return
            if what == "make":
                answer = make(Shape(**request["shape"]), request["seed"], request["path"])
            elif what == "load":
                loaded = Llama(**request)
                answer = {"settings": loaded.settings}
            else:
                answer = getattr(loaded, what)(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "missing": isinstance(error, ImportError)}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
