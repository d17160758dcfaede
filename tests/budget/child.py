"""Run in a process of its own: load a model under a budget, generate, and print as JSON what the system says was used.

python -m tests.budget.child MODEL EXPERT_CACHE_BYTES
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from colibri_lab.engine.engine import Engine

TOKENS = 48


def peak_bytes() -> int:
    """Largest resident set so far. Linux's VmHWM starts anew with the program, ru_maxrss may be the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def read_bytes(direct: bool) -> int | None:
    """Bytes that this process had from the disk (direct), or from read calls; None where the system does not say."""
    io = Path("/proc/self/io")
    if not io.exists():
        return None
    return next(int(n) for name, n in map(str.split, io.open()) if name == ("read_bytes:" if direct else "rchar:"))


def main() -> None:
    model, budget = sys.argv[1], int(sys.argv[2])
    with Engine.load(model, backend="cpu", threads=1, expert_cache_bytes=budget, telemetry=False) as engine:
        direct = engine.describe()["direct_io"]
        loaded, before = read_bytes(direct), engine.counters()["pager"]["bytes_read"]
        tokens = [token.id for token in engine.generate([5, 6, 7], max_tokens=TOKENS, temperature=1.0, seed=1)]
        counters, done = engine.counters(), read_bytes(direct)
        print(
            json.dumps(
                {
                    "peak": peak_bytes(),
                    "facts": engine.describe(),
                    "pager": counters["pager"],
                    "kv": counters["kv"],
                    "generating": None if loaded is None or done is None else done - loaded,
                    "counted": counters["pager"]["bytes_read"] - before,
                    "tokens": tokens,
                }
            )
        )


if __name__ == "__main__":
    main()
