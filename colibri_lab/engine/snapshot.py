"""What is in memory at one moment, for boards and recordings that begin late: events tell changes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..ops.cuda import CudaBackend
from .sequence import Request

MOST = 8192  # slots of one note, so that it fits into a line of a trace


def snapshot(parts: Any, running: Iterable[Request]) -> Iterator[dict[str, Any]]:
    """Values of "snapshot" notes: resident and pinned experts, and those on the GPU, as layer * E + expert, and the KV
    slots of the running sequences as [slot, sequence, layer, owner, tokens]; the first note has all experts and the
    first slots."""
    pager, kv = parts.pager, parts.kv
    slots = [
        [slot, request.number, layer, owner, kv.slots.valid[slot].bit_count()]
        for request in running
        for layer, table in enumerate(kv.table(request.seat))
        for owner, held in table.items()
        for slot in held
    ]
    resident = np.flatnonzero(pager.table[:, :, 0] >= 0).tolist()
    pinned = sorted(pager._pins.held) if pager._pins else []
    tier = parts.backend.tier if isinstance(parts.backend, CudaBackend) else None
    device = {} if tier is None else {"device": sorted(tier.keys)}
    yield {"resident": resident, "pinned": pinned, **device, "slots": slots[:MOST]}
    yield from ({"slots": slots[i : i + MOST]} for i in range(MOST, len(slots), MOST))
