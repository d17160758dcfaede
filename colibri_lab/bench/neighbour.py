"""A process that keeps a disk busy: `python -m colibri_lab.bench.neighbour FOLDER`, until its input is closed.

It reads and writes at random in a file of FOLDER, past the page cache. The file has no name from the first moment on,
so nothing is left of it however the process ends. It says "ready" once it works, and at its end how many bytes moved.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from colibri_lab.memory import Region

BLOCK, BLOCKS = 1 << 20, 256  # bytes of an access; of them in the file
THREADS = 4  # accesses under way at a time
WRITES = 0.25  # share of accesses


class Hungry:
    """What the neighbour did; `rate` once it has ended."""

    rate = 0.0  # bytes a second


@contextmanager
def neighbour(folder: Path) -> Iterator[Hungry]:
    """It is there and works inside the block. ValueError with its reason where it cannot begin."""
    found = Hungry()
    command = [sys.executable, "-m", __name__, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        said = child.stdout.readline().strip()
        if said != "ready":
            raise ValueError(f"the disk-hungry neighbour cannot work in {folder}: {said}")
        yield found
        child.stdin.close()
        found.rate = float(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def main(folder: Path) -> None:
    """Work until standard input ends, which it does too when whoever started this is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us, and who ends us
    try:
        fd = _file(folder)
    except OSError as error:
        print(error.strerror or error)
        return
    begin, moved = perf_counter(), [0] * THREADS
    for number in range(THREADS):
        threading.Thread(target=_work, args=(fd, number, moved), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    print(sum(moved) / (perf_counter() - begin), flush=True)
    os._exit(0)  # the threads are in the middle of something


def _file(folder: Path) -> int:
    import fcntl

    fd, name = tempfile.mkstemp(prefix="neighbour-", dir=folder)
    os.unlink(name)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
    block = _block()
    for i in range(BLOCKS):
        os.pwrite(fd, block, i * BLOCK)
    return fd


def _work(fd: int, number: int, moved: list[int]) -> None:
    block, chance = _block(), random.Random(number)
    while True:
        at = chance.randrange(BLOCKS) * BLOCK
        if chance.random() < WRITES:
            moved[number] += os.pwrite(fd, block, at)
        else:
            moved[number] += os.preadv(fd, [block], at)


def _block() -> memoryview:
    data = Region(BLOCK, huge=False).data
    data[:] = 1
    return data.data


if __name__ == "__main__":
    main(Path(sys.argv[1]))
