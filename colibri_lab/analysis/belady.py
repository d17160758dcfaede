"""The best that any cache could have done, knowing the future (Belady 1966). For analysis only."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

NEVER = 1 << 60


def belady(waves: Sequence[Sequence[int]], capacity: int, forced: bool) -> tuple[int, int, int]:
    """(hits, faults, evictions) of keys asked for wave by wave, with room for `capacity` of them.

    Who is needed again latest leaves. forced: a key that was read takes a place, as a kernel needs it there, and the
    keys of a wave stay until the wave is over. Otherwise a key may be read past the cache, which no engine that
    computes from its cache can do: the bound is then a little lower than what can be reached.
    """
    nexts = _next_uses(waves)
    resident: dict[int, int] = {}  # key -> its next use
    heap: list[tuple[int, int]] = []  # (-next use, key), entries that are no longer true are skipped
    hits = faults = evictions = 0
    for wave, upcoming in zip(waves, nexts, strict=True):
        missing = [key for key in wave if key not in resident]
        faults += len(missing)
        hits += len(wave) - len(missing)
        after = dict(zip(wave, upcoming, strict=True))
        for key in wave:
            if key in resident:
                resident[key] = after[key]
                heappush(heap, (-after[key], key))
        busy = set(wave) if forced else set()
        for key in missing:
            if len(resident) >= capacity:
                victim = _farthest(heap, resident, busy)
                if not forced and resident[victim] <= after[key]:
                    continue  # it would come again later than all others: read, used, not kept
                del resident[victim]
                evictions += 1
            resident[key] = after[key]
            heappush(heap, (-after[key], key))
    return hits, faults, evictions


def _next_uses(waves: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each key of each wave, the number of the next wave that asks for it, NEVER if none does."""
    seen: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(waves) - 1, -1, -1):
        found.append([seen.get(key, NEVER) for key in waves[number]])
        seen.update(dict.fromkeys(waves[number], number))
    return found[::-1]


def _farthest(heap: list[tuple[int, int]], resident: dict[int, int], busy: set[int]) -> int:
    aside = []
    while True:
        at, key = heap[0]
        if resident.get(key) != -at:
            heappop(heap)
        elif key in busy:
            aside.append(heappop(heap))
        else:
            break
    for entry in aside:
        heappush(heap, entry)
    return key
