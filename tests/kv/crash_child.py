"""A process that stores and restores prefixes until it is killed.

python -m tests.kv.crash_child MODEL FOLDER: for each number on stdin a fork generates from that text on, on and on;
its process number goes to stdout, so that the test can kill it. The parent stays warm.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.kv.stored import load, prompt, said

TEXTS = [prompt(1, 60), prompt(1, 60)[:40] + prompt(2, 30), prompt(3, 50), prompt(1, 60)[:33]]


def work(model: Path, folder: Path, seed: int) -> None:
    engine = load(model, folder, kv_cache_quota_bytes=3_000_000)
    while True:
        said(engine, TEXTS[seed % len(TEXTS)], 20 + seed % 7)
        seed += 1


def main() -> None:
    model, folder = map(Path, sys.argv[1:3])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with load(model, folder) as engine:  # everything imported and compiled
        said(engine, TEXTS[2][:4], 1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            work(model, folder, int(line))
        print(child, flush=True)


if __name__ == "__main__":
    main()
