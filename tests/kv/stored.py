"""A tiny model whose slots are whole pages from 8 tokens on, and what one wants to know of a folder of prefixes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.convert import convert
from colibri_lab.engine.engine import Engine
from colibri_lab.kv.persist_format import HEAD
from tests.makers import make

WIDE = {"head_dim": 64, "num_key_value_heads": 4, "num_experts": 5, "mlp_only_layers": [1], "num_hidden_layers": 3}
SIZE = 8  # tokens of 512 bytes in fp16: one page


def tiny(at: Path, seed: int = 5, **overrides: Any) -> Path:
    """A converted Qwen3-MoE with a dense layer."""
    source = make("qwen3_moe", seed, **{**WIDE, **overrides}).save(at / f"hf-{seed}")
    return convert(source, at / f"model-{seed}", quantize="int4")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 60, length).tolist()  # type: ignore[no-any-return]


def load(model: Path, folder: Path | None, **settings: Any) -> Engine:
    how = {"threads": 1, "kv_cache_slot_size": SIZE, "kv_cache_max_slots": 1024, "max_batch_size": 4, **settings}
    return Engine.load(model, **({} if folder is None else {"kv_cache_persistence_path": folder}), **how)


def said(engine: Engine, ids: list[int], tokens: int = 12, **how: Any) -> list[tuple[int, float, bytes]]:
    """All of the generated tokens that persistence could change."""
    return [(t.id, t.logprob, t.weights.tobytes()) for t in engine.generate(ids, max_tokens=tokens, **how)]


def store(model: Path, folder: Path, ids: list[int], tokens: int = 12, **settings: Any) -> dict[str, Any]:
    """Generate once with a folder; the counters of persistence when all is on the disk."""
    engine = load(model, folder, **settings)
    said(engine, ids, tokens)
    engine.close()
    return engine.counters()["persistence"]


def indexes(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefix-*.index"))


def taken(folder: Path) -> int:
    """Bytes that the folder's own files take on the disk."""
    total = 0
    for path in folder.glob("prefix-*"):
        with suppress(FileNotFoundError):  # it got its name, or went, meanwhile
            total += path.stat().st_blocks * 512
    return total


def tokens_of(index: Path) -> list[int]:
    data = index.read_bytes()
    count = HEAD.unpack(data[: HEAD.size])[7]
    return np.frombuffer(data, "<i4", count, HEAD.size).tolist()  # type: ignore[no-any-return]
