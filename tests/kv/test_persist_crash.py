"""Killed at random moments, or several at once on one folder: never a wrong token, and nothing of the dead stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colibri_lab.kv.persist_folder import Folder, Stored

from .crash_child import TEXTS
from .stored import indexes, load, prompt, said, store, tiny

ROOT = Path(__file__).parents[2]
KILLS = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("models"))


def test_killed_a_hundred_times(model: Path, tmp_path: Path) -> None:
    """A child is killed while it stores, evicts and restores; after each kill its successor gives the right tokens."""
    with load(model, None) as engine:
        right = [said(engine, text, 30) for text in TEXTS]
    chance = random.Random(4)
    command = [sys.executable, "-m", "tests.kv.crash_child", str(model), str(tmp_path)]
    used = stored = 0
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nest:
        assert nest.stdin is not None and nest.stdout is not None
        for kill in range(KILLS):
            print(chance.randrange(100), file=nest.stdin, flush=True)
            child = int(nest.stdout.readline())
            time.sleep(chance.uniform(0, 0.12))
            os.kill(child, signal.SIGKILL)
            while alive(child):
                time.sleep(0.001)
            with load(model, tmp_path) as engine:
                orphans = {p.stem for p in tmp_path.glob("*.kv")} - {p.stem for p in tmp_path.glob("*.index")}
                assert not orphans and not list(tmp_path.glob("*.new")), "what the dead left behind is removed"
                stored = max(stored, len(indexes(tmp_path)))
                text = kill % len(TEXTS)
                assert said(engine, TEXTS[text], 30) == right[text]
                kv = engine.counters()["persistence"]
                assert kv["refused_damaged"] == 0, "half-written files are never taken for stored prefixes"
                used += kv["tokens_restored"]
            if kill % 10 == 9:  # begin anew, so that first files are written under fire too
                for path in tmp_path.iterdir():
                    path.unlink()
        nest.stdin.close()
    assert used > 1000 and stored > 1, "the test wants prefixes that were written by the killed"


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_share_a_folder(model: Path, tmp_path: Path) -> None:
    """Three at once, with a quota that makes them evict each other's prefixes: each says what it would say alone."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.kv.crash_child import TEXTS\n"
        "from tests.kv.stored import load, said\n"
        "model, folder, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])\n"
        "with load(model, None) as engine:\n    right = [said(engine, text, 30) for text in TEXTS]\n"
        "with load(model, folder, kv_cache_quota_bytes=2_000_000) as engine:\n"
        "    for i in range(first, first + 24):\n"
        "        assert said(engine, TEXTS[i % 4], 30) == right[i % 4]\n"
        "    kv = engine.counters()['persistence']\n"
        "    assert kv['stopped'] == kv['refused_damaged'] == 0, engine.describe()['kv_persistence']\n"
        "    print(kv['tokens_restored'])\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(model), str(tmp_path), str(first)], cwd=ROOT,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for first in range(3)
    ]  # fmt: skip
    said_ = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], [error[-2000:] for _, error in said_]
    assert sum(int(out) for out, _ in said_) > 1000


@pytest.mark.parametrize("seeds", [("1", "2")])
def test_another_hash_seed_finds_it(model: Path, tmp_path: Path, seeds: tuple[str, str]) -> None:
    """What one process stored, the next finds, whatever Python's hashes are seeded with."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.kv.stored import prompt, store\n"
        "kv = store(Path(sys.argv[1]), Path(sys.argv[2]), prompt(1, 60))\n"
        "print(kv['prefixes_stored'], kv['tokens_restored'])\n"
    )
    out = [
        subprocess.run([sys.executable, "-c", script, str(model), str(tmp_path)], cwd=ROOT, check=True, text=True,
                       env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, timeout=60).stdout.split()
        for seed in seeds
    ]  # fmt: skip
    assert out == [["1", "0"], ["0", "59"]]


def test_another_process_made_it_longer_meanwhile(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our reading an index and our taking the file to go on in it: what the other wrote stays as it is."""
    text = prompt(1, 60)
    longer = [text + prompt(20, 40), text + prompt(21, 40)]
    with load(model, None) as engine:
        right = [said(engine, ids, 5) for ids in longer]
    store(model, tmp_path, text, tokens=1)
    claim = Folder.claim

    def late(self: Folder, stored: Stored, size: int) -> int:
        monkeypatch.setattr(Folder, "claim", claim)
        assert store(model, tmp_path, longer[0], tokens=1)["prefixes_stored"] == 1
        return claim(self, stored, size)

    with load(model, tmp_path) as engine:
        monkeypatch.setattr(Folder, "claim", late)
        assert said(engine, longer[1], 5) == right[1]
    assert len(indexes(tmp_path)) == 2, "one made longer, one of its own"
    with load(model, tmp_path) as engine:
        assert [said(engine, ids, 5) for ids in longer] == right
        kv = engine.counters()["persistence"]
        assert kv["tokens_restored"] == 2 * 99 and kv["refused_damaged"] == 0


def test_what_a_living_writer_has_is_left_alone(model: Path, tmp_path: Path) -> None:
    with load(model, tmp_path) as engine:
        stream = engine.generate(prompt(9, 60), max_tokens=60)
        heard = [next(stream) for _ in range(20)]
        while not indexes(tmp_path):  # of the prompt, once it is on the disk
            time.sleep(0.001)
        files = set(tmp_path.iterdir())
        store(model, tmp_path, prompt(10, 60), tokens=1, kv_cache_quota_bytes=4096)
        assert set(tmp_path.iterdir()) == files, "neither swept as unfinished nor evicted"
        heard += list(stream)
    with load(model, None) as engine:
        assert [t.id for t in heard] == [token for token, *_ in said(engine, prompt(9, 60), 60)]
