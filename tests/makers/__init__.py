"""Makers of test inputs: tiny checkpoints, safetensors files right and wrong, tiny tokenizers. NumPy only."""

from .checkpoint import ABSENT, FAMILIES, Checkpoint, Shape, base_config, chain, exact_4bit, exact_8bit, make
from .safetensors_writer import as_dtype, from_bf16, header_of, rounded, to_bf16, write_raw, write_safetensors
from .tokenizers import byte_tokenizer

__all__ = [
    "ABSENT",
    "FAMILIES",
    "Checkpoint",
    "Shape",
    "as_dtype",
    "base_config",
    "byte_tokenizer",
    "chain",
    "exact_4bit",
    "exact_8bit",
    "from_bf16",
    "header_of",
    "make",
    "rounded",
    "to_bf16",
    "write_raw",
    "write_safetensors",
]
