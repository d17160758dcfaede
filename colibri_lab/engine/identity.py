"""Which stored keys and values are this engine's: a digest of all that decides them, and the folder where they are."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import ConfigError, NotAvailable
from ..kv.cache import KVCache
from ..kv.persist import Persistence
from ..kv.persist_folder import Folder
from ..kv.persist_format import Layout
from ..model.store import ModelFile
from ..ops.types import Backend
from ..paths import kernels_dir

KEY = "settings: kv_cache_persistence_path"


def open_persistence(config: Config, file: ModelFile, backend: Backend, kv: KVCache, top_k: int, router: Any,
                     tell: Callable[[str, Any], None]) -> Persistence | None:  # fmt: skip
    """None without a path. ConfigError for a folder that cannot be, and for slots that are not whole pages of memory.

    router: a foreign router object or None. tell: where notes of what happens to the folder go.
    """
    path, size, quota = config.kv_cache_persistence_path, kv.slots.size, config.kv_cache_quota_bytes
    if path is None:
        if quota is not None:
            raise ConfigError("settings: kv_cache_quota_bytes: of no folder; name one with kv_cache_persistence_path")
        return None
    if backend.name in ("sim", "cuda"):
        raise NotAvailable(
            f"{KEY}: not available yet with backend: {backend.name}, whose keys and values stay on its device; "
            f"set backend: cpu, or leave the path out"
        )
    token = math.prod(kv.pool.k.shape[1:]) * kv.pool.k.itemsize
    if size * token % mmap.PAGESIZE:
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, token)
        raise ConfigError(
            f"{KEY}: a slot is mapped in whole pages of {mmap.PAGESIZE} bytes; kv_cache_slot_size {size} makes "
            f"{size * token} bytes, the nearest that fits is {max(1, round(size / step)) * step}"
        )
    identity, positions = identify(config, file, backend, kv, top_k, router), kv.pool.where.shape[2]
    layout = Layout(identity, kv.layers, size, token, config.kv_cache_dtype, positions, max(1, file.spec.experts))
    try:
        folder = Folder.open(path, quota, layout)
    except OSError as error:
        raise ConfigError(f"{KEY}: {path}: cannot be used as a folder ({error.strerror}); name another one") from None
    return Persistence(folder, kv, tell)


def identify(config: Config, file: ModelFile, backend: Backend, kv: KVCache, top_k: int, router: Any) -> bytes:
    """32 bytes: contents of the model and of the code that computes, precision, router, attention.

    Threads, batches, caches and ISA levels change no bit and are not part of it; slot size and dtype of the cache are
    compared apart.
    """
    if router is not None and not isinstance(getattr(router, "identity", None), str):
        raise ConfigError(
            f"{KEY}: router {type(router).__name__} does not say what it is: give it a text `identity` that changes "
            f"when its choices would, or leave the path out"
        )
    said = config.router if router is None else f"object {router.identity}"
    facts = {
        "model": file.digest(),
        "backend": backend.name,
        "precision": backend.precision,
        "code": _code(),
        "router": [said, top_k, config.router_dtype, config.router_quant_bits],
        "attention": [config.attention, kv.pool.recent, kv.pool.sinks],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def _code() -> str:
    """Of kernels and their Python: another rounding makes other keys."""
    digest = hashlib.sha256()
    for folder in (kernels_dir() / "cpu", Path(__file__).parent.parent / "ops"):
        for path in sorted(folder.iterdir()):
            if path.suffix in (".c", ".h", ".py"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
