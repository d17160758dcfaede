"""Launches that are captured once and replayed: a graph for each shape of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from .device import Device


class Graphs:
    """captured, recaptured, replays: counted since it was made."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Hashable, tuple[Hashable, int]] = {}  # key -> (stamp, number of a graph)
        self.captured = self.recaptured = self.replays = 0

    def run(self, key: Hashable, stamp: Hashable, work: Callable[[], None]) -> None:
        """Do what `work` launches: by itself the first time, which loads its kernels, and by a graph from then on.

        key: what makes it other launches; stamp: what the launches have as arguments and cannot look up on the device.
        A graph with another stamp is captured anew.
        """
        stamped, graph = self._made.get(key, (None, None))
        if graph is not None and stamped == stamp:
            self._device.replay(graph)
            self.replays += 1
            return
        if graph is not None:
            del self._made[key]
            self._device.drop(graph)
            self.recaptured += 1
        work()
        try:
            self._made[key] = stamp, self._device.captured(work)
        except Exception as error:
            error.add_note("while a step was captured as a graph; cuda_graphs: off does without")
            raise
        self.captured += 1

    def counters(self) -> dict[str, int]:
        return {"graphs_captured": self.captured, "graphs_recaptured": self.recaptured, "graph_replays": self.replays}
