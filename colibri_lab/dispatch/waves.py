"""Split a layer's experts into waves that the expert cache can hold, in ascending order.

Expert kernels group the rows themselves and read them in place, so nothing is copied here: `bytes_copied` stays 0.
"""

from __future__ import annotations

from collections.abc import Sequence


class Dispatcher:
    """Counts what is dispatched and cuts waves. A row adds its experts in ascending order whatever the waves are."""

    def __init__(self, experts: int, top_k: int) -> None:
        self.experts, self.top_k = experts, top_k
        self.rows = 0  # (row, expert) pairs sent to experts
        self.waves = 0
        self.bytes_copied = 0

    def split(self, chosen: Sequence[Sequence[int]], room: int) -> Sequence[tuple[int, int, Sequence[int]]]:
        """(first, last, experts) of each wave: together [0, E), each with at most `room` experts that rows chose.

        chosen: the experts of each row, [n][k]. room: experts that fit into memory at once, at least 1.
        """
        self.rows += len(chosen) * self.top_k
        wanted = chosen[0] if len(chosen) == 1 else list({expert for row in chosen for expert in row})
        if len(wanted) <= room:
            self.waves += 1
            return ((0, self.experts, wanted),)
        wanted = sorted(wanted)
        groups = [wanted[i : i + room] for i in range(0, len(wanted), room)]
        self.waves += len(groups)
        edges = [0, *(group[0] for group in groups[1:]), self.experts]
        return list(zip(edges, edges[1:], groups, strict=False))

    def counters(self) -> dict[str, int]:
        return {"rows": self.rows, "waves": self.waves, "bytes_copied": self.bytes_copied}
