"""A process that fills its memory while it generates: arguments are the model, the limit in bytes, and a control group.

Where no group could be made, the limit is this process's own and its resident memory is what is read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import psutil

from colibri_lab.engine import Engine
from colibri_lab.engine.probe import HostProbe, Reading

PROMPTS = [[5 + i, 6] for i in range(8)]


class Mine(HostProbe):
    """This process's memory; the processor counts as idle, whatever else the machine does."""

    def __init__(self, limit: int, own: bool) -> None:
        super().__init__()
        self._limit, self._own = limit, own

    def read(self) -> Reading:
        reading = dataclasses.replace(super().read(), idle=1.0)
        if self._own:
            return dataclasses.replace(reading, memory=min(1.0, psutil.Process().memory_info().rss / self._limit))
        return reading


def main(model: Path, limit: int, group: Path | None) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    with Engine.load(model, threads=1) as engine:
        right = [[t.id for t in engine.generate(prompt, max_tokens=1)] for prompt in PROMPTS]
    settings = dict(threads=1, max_batch_size=8, batch_adapt_interval_ms=5, kv_cache_max_slots=4096)
    with Engine.load(model, **settings) as engine:
        probe = Mine(limit, group is None)
        engine.watch(probe)
        tokens = engine.generate_batch(PROMPTS, max_tokens=900)
        said = [[next(tokens) for _ in PROMPTS]]

        def until(reached: bool, most: int) -> int:
            """Goes on until the cap is down to 1, or up again."""
            for _ in range(most):
                next(tokens)
                if (engine.counters()["batch"]["cap"] == 1) == reached:
                    break
            return int(engine.counters()["batch"]["cap"])

        before, held = int(engine.counters()["batch"]["cap"]), []
        while probe.read().memory < 0.88:
            held.append(bytearray(os.urandom(4096) * 1024))
        pressed, why = until(True, 3000), engine.telemetry.facts["batch"]["reason"]
        held.clear()
        relieved = until(False, 3000)
        tokens.close()
        first = sorted((i, t.id) for i, t in said[0])
        same = [id for _, id in first] == [ids[0] for ids in right]
        print(json.dumps({"before": before, "pressed": pressed, "relieved": relieved, "why": why, "same": same,
                          "halvings": engine.counters()["batch"]["halvings"]}))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3] else None)
