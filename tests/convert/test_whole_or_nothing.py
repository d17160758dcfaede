"""A conversion is there whole or not at all.

Killed, interrupted, out of space, over an older one, twice at once (E7).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.convert import convert, ensure_converted
from colibri_lab.convert.cache import source_key
from colibri_lab.convert.lock import Lock, locked_elsewhere
from colibri_lab.model.errors import ModelError
from colibri_lab.model.store import ModelFile
from tests.makers import make

SLOW = """
import sys, time
from colibri_lab.convert import convert
share = float(sys.argv[3])
def report(done, total):
    if done >= share * total:
        print("there", flush=True)
        time.sleep(60)
convert(sys.argv[1], sys.argv[2], progress=report, overwrite=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("mixtral").with_tokenizer().save(tmp_path / "hf")


def start(code: str, *args: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_there(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_stopped_on_the_way(folder: Path, tmp_path: Path, share: float, kind: signal.Signals) -> None:
    out = tmp_path / "new" / "out"
    with start(SLOW, folder, out, share) as process:
        until_there(process)
        process.send_signal(kind)
        process.communicate(timeout=30)
    assert process.returncode != 0
    assert not out.exists()
    left = os.listdir(tmp_path / "new") if (tmp_path / "new").exists() else []
    assert len(left) == (1 if kind == signal.SIGKILL else 0), "an interrupt cleans up, a kill cannot"
    convert(folder, out)
    ModelFile.open(out).close()
    assert os.listdir(tmp_path / "new") == ["out"], "what a killed conversion left is gone"


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_an_older_conversion_survives(folder: Path, tmp_path: Path, kind: signal.Signals) -> None:
    out = convert(folder, tmp_path / "out", quantize="int8")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with start(SLOW, folder, out, 0.6) as process:
        until_there(process)
        process.send_signal(kind)
        process.communicate(timeout=30)
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert after == before
    convert(folder, out, overwrite=True)
    assert sorted(os.listdir(out)) == sorted(before)
    with ModelFile.open(out) as file:
        assert file.quantize == "int4"


def test_a_living_conversion_is_left_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(SLOW, folder, out, 0.3) as process:
        until_there(process)
        (working,) = tmp_path.glob(".out.*.partial")
        convert(folder, out)
        assert working.is_dir()
        process.kill()
    ModelFile.open(out).close()


def test_disk_full_on_the_way(folder: Path, tmp_path: Path) -> None:
    """The file may not grow past half its size: the older one stays, the message has one line, nothing else is left."""
    out = convert(folder, tmp_path / "out")
    before = (out / "model.colibri").read_bytes()
    code = (
        "import resource, sys\n"
        "from colibri_lab.convert import convert\nfrom colibri_lab.model.errors import ModelError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)\n"
        "try:\n    convert(sys.argv[1], sys.argv[2], overwrite=True)\n"
        "except ModelError as error:\n    print(error)\n    sys.exit(2)\n"
    )
    with start(code, folder, out, len(before) // 2) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "cannot be written (File too large)" in said
    assert said.count("\n") == 1
    assert (out / "model.colibri").read_bytes() == before
    assert len(os.listdir(out)) == len(set(os.listdir(out)) - {".partial"}) == 3


def test_errors_while_writing_leave_nothing(folder: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def report(done: int, total: int) -> None:
        if done > total / 2:
            raise Stop

    with pytest.raises(Stop):
        convert(folder, tmp_path / "a" / "b", progress=report)
    assert sorted(os.listdir(tmp_path)) == ["hf"]


def test_a_folder_that_cannot_be_made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **how: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(ModelError, match=r"out: cannot be made \(Permission denied\)"):
        convert(folder, tmp_path / "x" / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf"]


# --- the cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_converted_once(folder: Path, cache: Path) -> None:
    out = ensure_converted(folder, "int4", 32)
    assert cache in out.parents
    stamp = (out / "model.colibri").stat().st_mtime_ns
    assert ensure_converted(folder, "int4", 32) == out
    assert (out / "model.colibri").stat().st_mtime_ns == stamp
    others = {
        ensure_converted(folder, "int4", 64),
        ensure_converted(folder, "int8", 32),
        ensure_converted(folder, "fp16", 32),
    }
    assert len(others | {out}) == 4
    assert ensure_converted(folder, "fp16", 64) in others, "fp16 has no groups"


def test_a_changed_source_is_converted_again(folder: Path, cache: Path) -> None:
    before = source_key(folder)
    out = ensure_converted(folder)
    weights = folder / "model.safetensors"
    stamp = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-40:] = bytes(40)
    weights.write_bytes(data)
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))
    assert source_key(folder) != before
    assert ensure_converted(folder) != out


def test_a_damaged_entry_is_made_again(folder: Path, cache: Path) -> None:
    out = ensure_converted(folder)
    os.truncate(out / "model.colibri", 70_000)
    assert ensure_converted(folder) == out
    with ModelFile.open(out) as file:
        file.weights()


def test_many_processes_at_once(folder: Path, cache: Path) -> None:
    code = "import sys\nfrom colibri_lab.convert import ensure_converted\nprint(ensure_converted(sys.argv[1]))\n"
    processes = [start(code, folder) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert len({out for out, _ in said}) == 1
    with ModelFile.open(said[0][0].strip()) as file:
        file.weights()
    made = [path for path in (cache / "models").iterdir() if path.is_dir()]
    assert len(made) == 1


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set COLIBRI_CACHE to a folder that can be written"):
        ensure_converted(folder)


def test_refused_before_the_cache_is_touched(folder: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="'int3'"):
        ensure_converted(folder, "int3", 32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        ensure_converted(folder)
    assert not cache.exists()


def test_locks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not locked_elsewhere(path)
    with Lock(path):
        assert locked_elsewhere(path)
        assert not Lock(path).acquire(wait=False)
    assert not locked_elsewhere(path)
    hold = "import sys, time\nfrom pathlib import Path\nfrom colibri_lab.convert.lock import Lock\n"
    hold += "Lock(Path(sys.argv[1])).acquire()\n"
    with start(hold + "print('there', flush=True)\ntime.sleep(60)\n", path) as process:
        until_there(process)
        assert locked_elsewhere(path)
        process.kill()
    for _ in range(100):
        if not locked_elsewhere(path):
            return
        time.sleep(0.05)
    pytest.fail("a dead process still holds its lock")
