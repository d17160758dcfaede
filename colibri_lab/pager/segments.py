"""`slru`, segmented LRU: an expert has to be used twice before it may push others out of the main segment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container


class SLRU:
    """Two LRU lists (Karedla, Love, Wherry 1994). New experts are on probation; a hit there protects them.

    At most `share` of the experts in memory are protected; beyond that the one used longest ago goes back on
    probation. The victim is the oldest on probation, a protected one only when there is no other. All calls are O(1).
    """

    def __init__(self, share: float = 0.8) -> None:
        self._share = share
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def hit(self, key: int) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        if len(self._protected) > self._share * (len(self._protected) + len(self._probation)):
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None

    def admit(self, key: int) -> None:
        self._probation[key] = None

    def victim(self, busy: Container[int]) -> int:
        for segment in (self._probation, self._protected):
            for key in segment:  # busy keys were touched last
                if key not in busy:
                    return key
        raise LookupError("all experts in memory are in use")

    def forget(self, key: int) -> None:
        segment = self._protected if key in self._protected else self._probation
        del segment[key]
