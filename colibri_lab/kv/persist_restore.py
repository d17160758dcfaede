"""A stored prefix into the slots of a seat: full blocks are mapped, the rest is read, all of it checked first."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..memory import map_file
from .cache import KVCache
from .persist_files import read_all
from .persist_format import Index, Refused
from .persist_writer import Saved, SlotBytes


@dataclass
class Restored:
    """saved: what a Writer that goes on in this file has to know."""

    saved: dict[int, Saved] = field(default_factory=dict)
    bytes: int = 0


def restore(kv: KVCache, seat: int, memory: SlotBytes, index: Index, fd: int, prompt: NDArray[np.int32],
            mapped: set[int], most: int) -> Restored | None:  # fmt: skip
    """Fill an empty seat with the first len(prompt) tokens; None when there are not enough free slots.

    mapped, at most `most`: slots whose memory is a file's. A block that is wanted to its last token is mapped, so that
    it takes no memory; one that will be written to is copied. Refused (damaged), OSError: the caller rewinds.
    """
    n, size = len(prompt), kv.slots.size
    if len(index.tokens) < n or (index.tokens[:n] != prompt).any():
        raise Refused("damaged", "has other tokens than it had")
    where = index.where[:, :n]
    wanted = np.bincount(where.ravel() // size, minlength=len(index.blocks)).tolist()
    if sum(count > 0 for count in wanted) > kv.slots.slots - kv.slots.used:
        return None
    done, slot_of = Restored(), np.full(len(index.blocks), -1, np.int32)
    for b, (block, count) in enumerate(zip(index.blocks.tolist(), wanted, strict=True)):
        if not count:
            continue
        layer, owner, fill, place, k, v = block
        slot = slot_of[b] = kv.take(seat, layer, owner)
        at = 2 * place * memory.slot
        whole = count == size and len(mapped) < most
        for view, offset, checksum in ((memory.keys[slot], at, k), (memory.values[slot], at + memory.slot, v)):
            if whole:
                mapped.add(int(slot))
                map_file(view, fd, offset)
                content: bytes | memoryview = view.data
            else:
                content = read_all(fd, fill * memory.token, offset)
            if zlib.crc32(content) != checksum:
                raise Refused("damaged", f"block {place} does not match its checksum")
            if not whole:
                view[: count * memory.token] = np.frombuffer(content, np.uint8)[: count * memory.token]
        done.saved[int(slot)] = Saved(place, fill, k, v)
        done.bytes += 2 * fill * memory.token
    kv.pool.where[seat, :, :n] = slot_of[where // size] * size + where % size
    kv.pool.first[seat, :, :n] = index.first[:, :n]
    kv.rewind(seat, n)
    return done
