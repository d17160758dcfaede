"""llama.cpp beside us: a child process that answers one JSON line with one JSON line.

It runs in the interpreter that has llama-cpp-python and gguf, which need not be ours; it imports those, NumPy and a few
light modules of the benchmarks. Requests: make, load, close, and the public methods of `Llama`.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench.harness import run_queue_delay
from colibri_lab.bench.peer_child import child
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


def make(shape: dict[str, Any], seed: int, path: str) -> dict[str, Any]:
    """Write the shape's random weights as a qwen3moe GGUF without a tokenizer."""
    import gguf

    s = Shape(**shape)
    writer = gguf.GGUFWriter(path + ".part", "qwen3moe")
    writer.add_name(f"random {s.name}")
    writer.add_context_length(s.positions)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(s.norm_eps)
    writer.add_rope_freq_base(s.theta)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_expert_feed_forward_length(s.ffn)
    writer.add_vocab_size(s.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)

    for name, data in tensors(s, seed):
        kind = gguf.GGMLQuantizationType.Q4_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path + ".part", path)
    return {"path": path, "bytes": Path(path).stat().st_size}


class Llama:
    """One model and one context through llama.cpp's C interface; `sequences` of `context` positions each."""

    def __init__(self, path: str, threads: int, repack: bool, mmap: bool, context: int, sequences: int = 1) -> None:
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
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context * sequences, 512, 512
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise OSError(f"llama.cpp has no room for {sequences} sequences of {context} positions")
        self.memory, self.layers = llama_cpp.llama_get_memory(self.context), llama_cpp.llama_model_n_layer(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        built = re.findall(r"(\w+) = 1\b", llama_cpp.llama_print_system_info().decode())
        switches = f"repack {_on(repack)}, mmap {_on(mmap)}, threads {threads}"
        self.settings = f"llama-cpp-python {llama_cpp.__version__}, {switches}, built with {' '.join(built)}"

    def forward(self, rows: Sequence[tuple[int, int, int]], wanted: bool = True) -> None:
        """One step of (token, position, sequence) rows; wanted: the logits of all of them, else of the last alone."""
        batch = self.c.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wanted or i == len(rows) - 1
            if self.c.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            self.c.llama_synchronize(self.context)
        finally:
            self.c.llama_batch_free(batch)

    def timed(self, rows: Sequence[tuple[int, int, int]], wanted: bool = True) -> tuple[float, float, float]:
        """(wall, CPU, run-queue delay) seconds of one step."""
        delay, cpu, wall = run_queue_delay(), time.process_time(), time.perf_counter()
        self.forward(rows, wanted)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall, cpu, run_queue_delay() - delay

    def decode(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """The prompt at once, then `tokens` one by one; seconds of each.

        llama.cpp leaves rows without logits out of the last layer's experts; where that is the only layer, all are
        wanted, or it would compute the experts of one row.
        """
        self.c.llama_memory_clear(self.memory, True)
        first = self.timed(_rows(prompt), self.layers == 1)
        return {"prompt": first, "steps": [self.timed(_rows([t], len(prompt) + i)) for i, t in enumerate(tokens)]}

    def together(self, prompts: list[list[int]], steps: list[list[int]]) -> dict[str, Any]:
        """A prompt for each sequence, then steps of one token for each; seconds of each step."""
        self.c.llama_memory_clear(self.memory, True)
        for sequence, prompt in enumerate(prompts):
            self.forward(_rows(prompt, 0, sequence), False)
        long = [len(prompt) for prompt in prompts]
        rows = [[(t, long[s] + i, s) for s, t in enumerate(tokens)] for i, tokens in enumerate(steps)]
        return {"steps": [self.timed(step) for step in rows]}

    def history(self, tokens: list[int], threads: int) -> dict[str, Any]:
        """Read a long text and keep it, with so many threads; seconds."""
        self.c.llama_memory_clear(self.memory, True)
        usual = self.c.llama_n_threads(self.context)
        self.c.llama_set_n_threads(self.context, threads, threads)
        begin = time.perf_counter()
        for start in range(0, len(tokens), 512):
            self.forward(_rows(tokens[start : start + 512], start), False)
        self.c.llama_set_n_threads(self.context, usual, usual)
        return {"seconds": time.perf_counter() - begin}

    def after(self, start: int, tokens: list[int]) -> dict[str, Any]:
        """Tokens one by one after a history of `start`, forgotten again; seconds of each."""
        steps = [self.timed(_rows([token], start + i)) for i, token in enumerate(tokens)]
        self.c.llama_memory_seq_rm(self.memory, 0, start, -1)
        return {"steps": steps}

    def logits(self, tokens: list[int], path: str) -> dict[str, Any]:
        """float32 [V] after the last token, saved as .npy."""
        self.c.llama_memory_clear(self.memory, True)
        self.forward(_rows(tokens), False)
        found = self.c.llama_get_logits_ith(self.context, -1)
        np.save(path, np.ctypeslib.as_array(found, shape=(self.vocab,)))
        return {"path": path}


def _rows(tokens: Sequence[int], start: int = 0, sequence: int = 0) -> list[tuple[int, int, int]]:
    return [(token, start + i, sequence) for i, token in enumerate(tokens)]


def _on(value: bool) -> str:
    return "on" if value else "off"


def main() -> None:
    child(Llama, {"make": make})


if __name__ == "__main__":
    main()
