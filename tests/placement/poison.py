"""NaN wherever nothing valid lies: in free frames, free KV slots and the page table of empty seats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from colibri_lab.kv.cache import KVCache
from colibri_lab.pager.frames import Frames

NAN_BYTE = b"\xff"  # NaN as float16 scales and as float32 weights


@contextmanager
def poisoned() -> Iterator[dict[str, int]]:
    """Engines made inside fill what they free, and what they never used, with NaN. Yields how often."""
    filled = {"frames": 0, "slots": 0}
    release, make_frames = Frames.release, Frames.__init__
    free_slot, make_cache, close = KVCache._release, KVCache.__init__, KVCache.close

    def frames(self: Frames, *args: Any, **kwargs: Any) -> None:
        make_frames(self, *args, **kwargs)
        self.array[:] = 0xFF

    def release_poisoned(self: Frames, run: int) -> None:
        self.view(run)[:] = NAN_BYTE * self.run_bytes
        filled["frames"] += 1
        release(self, run)

    def cache(self: KVCache, *args: Any, **kwargs: Any) -> None:
        make_cache(self, *args, **kwargs)
        self.pool.k[:] = np.nan
        self.pool.v[:] = np.nan
        self.pool.where[:] = self.pool.staging - 1

    def free_poisoned(self: KVCache, seat: int, layer: int, owner: int, slot: int) -> None:
        free_slot(self, seat, layer, owner, slot)
        size = self.slots.size
        self.pool.k[slot * size : (slot + 1) * size] = np.nan
        self.pool.v[slot * size : (slot + 1) * size] = np.nan
        filled["slots"] += 1

    def close_poisoned(self: KVCache, seat: int) -> None:
        close(self, seat)
        self.pool.where[seat] = self.pool.staging - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Frames, "__init__", frames)
        patch.setattr(Frames, "release", release_poisoned)
        patch.setattr(KVCache, "__init__", cache)
        patch.setattr(KVCache, "_release", free_poisoned)
        patch.setattr(KVCache, "close", close_poisoned)
        yield filled
