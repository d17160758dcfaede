"""The slot pool: fixed-size slots of tokens, memory used only from a slot's first write, nothing ever cleared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..memory import zeros
from ..ops.types import SEEN, KVPool

MOST = 2**31 - 1  # tokens of a pool: places are int32
OWNERS = 16  # slots of a layer and sequence that may be nearly empty: one or two of each owner's
SHORT = 16 << 20  # bytes of keys, and of values, that use no more memory than what is written; those above, huge pages


class SlotPool:
    """`slots` slots of `size` tokens. valid[s] is the bitmap of slot s as an integer; bit i: token i holds data.

    Tokens are appended, so the next free place of a slot is its bitmap's bit length.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.slots, self.size = slots, size
        self.valid = [0] * slots
        self.peak = 0
        self._free = list(range(slots - 1, -1, -1))  # last freed is taken first: its memory is already there

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.slots - len(self._free)

    def take(self) -> int:
        """A free slot, empty; -1 when there is none."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self.valid[slot] = 0
        self.peak = max(self.peak, self.used)
        return slot

    def release(self, slot: int) -> None:
        self.valid[slot] = 0
        self._free.append(slot)

    def tokens(self) -> int:
        """Tokens that hold data, over all slots (each layer of a token counts)."""
        return sum(map(int.bit_count, self.valid))


def allocate(slots: int, size: int, rows: int, kv_heads: int, head_dim: int, dtype: str,
             seats: int, layers: int, positions: int, recent: int = 0, sinks: int = 0) -> KVPool:  # fmt: skip
    """The arrays that kernels see. staging: `rows` extra tokens at the end, where a step's K/V wait for their slot.

    ConfigError for a pool that the tables' int32 places or the system's address space cannot hold.
    """
    kind: type[np.floating] = np.float16 if dtype == "fp16" else np.float32
    shape = (slots * size + rows, kv_heads, head_dim)
    asked = f"kv_cache_max_slots: {slots} slots of {size} tokens (kv_cache_slot_size)"
    if shape[0] > MOST:
        raise ConfigError(f"{asked} are more than the {MOST - rows} tokens that a pool can have; choose fewer")
    try:
        token = kv_heads * head_dim * np.dtype(kind).itemsize
        begun = seats * layers * OWNERS * size * token  # what owners' last slots take at most, however empty they are
        long = range(max(SHORT, begun), slots * size * token)  # taken from the first on: only long texts get here
        k: NDArray[Any] = zeros(shape, kind, long)
        v: NDArray[Any] = zeros(shape, kind, long)
    except OSError as error:
        need = 2 * math.prod(shape) * np.dtype(kind).itemsize / 2**30
        raise ConfigError(f"{asked} need {need:.1f} GiB of address space: {error.strerror}; choose fewer") from None
    where: NDArray[Any] = zeros((seats, layers, positions), np.int32)
    first: NDArray[Any] = zeros((seats, layers, positions), np.int16)
    seen = np.zeros((layers, len(SEEN)), np.int64)
    return KVPool(k, v, where, first, slots * size, seen, recent, sinks)
