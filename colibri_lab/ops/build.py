"""Compile kernels/cpu with the system's compiler, once per source text, flags and compiler, into the user's cache.

An entry of the cache is a folder `cpu-LEVEL-KEY` with the library and its SHA-256. It is made under another name and
renamed, so that processes starting together never see half an entry; one that is damaged or belongs to somebody else is
not used. Where the cache cannot be written, a private temporary folder serves this process, with one warning.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

from ..paths import cache_dir, kernels_dir
from . import isa

# No -ffast-math, no contraction: a multiply-add that is rounded once would differ between levels.
COMMON = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wno-psabi")
LIBRARY, DIGEST = "kernels.so", "sha256"

_loaded: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


class KernelError(RuntimeError):
    """The CPU kernels cannot be compiled or loaded; the message says what is missing."""


def load(level: str) -> ctypes.CDLL:
    """The library of one ISA level, compiled if need be. Calls through it release the GIL. KernelError."""
    with _lock:
        if level not in _loaded:
            _loaded[level] = _load(level)
        return _loaded[level]


def forget() -> None:
    """Let the next backend compile again if a source has changed since; bound backends keep what they have."""
    with _lock:
        _loaded.clear()


def compiler() -> str:
    """The C compiler: $CC, else cc, gcc or clang. KernelError says how to get one."""
    wanted = os.environ.get("CC")
    for name in [shlex.split(wanted)[0]] if wanted and wanted.strip() else ["cc", "gcc", "clang"]:
        found = shutil.which(name)
        if found:
            return found
    if sys.platform == "darwin":
        how = "install Apple's with: xcode-select --install"
    else:
        how = "on Debian and Ubuntu: apt install gcc libc6-dev (or build-essential)"
    raise KernelError(f"no C compiler ({wanted or 'cc, gcc or clang'}) to build the CPU kernels with; {how}")


def source() -> Path:
    """The file to compile; it includes the rest of its folder."""
    return kernels_dir() / "cpu" / "colibri.c"


def _load(level: str) -> ctypes.CDLL:
    command = [compiler(), *COMMON, *isa.FLAGS[level]]
    return library([*command, str(source())], f"cpu-{level}-{_key(command)}")


def library(command: list[str], name: str, text: str | None = None) -> ctypes.CDLL:
    """The cache's entry `name`, compiled by `command` (less the output) if need be; text: what it reads from stdin.

    KernelError. The caller makes `name` from all that decides the result.
    """
    try:
        folder = _own_folder(cache_dir() / "kernels")
    except OSError as error:
        return _private(command, name, text, error)
    entry = folder / name
    found = _open(entry)
    if found is not None:
        return found
    try:
        return _publish(command, entry, text)
    except OSError as error:
        return _private(command, name, text, error)


def _publish(command: list[str], entry: Path, text: str | None) -> ctypes.CDLL:
    """Compile beside `entry`, rename into place, load. OSError: the folder cannot be written."""
    made = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        _compile(command, made, text)
        for _ in range(2):
            try:
                made.rename(entry)
                break
            except OSError:  # there is one already: a faster process's, or a damaged one
                library = _open(entry)
                if library is not None:
                    return library
                aside = Path(tempfile.mkdtemp(prefix=f".{entry.name}-old-", dir=entry.parent))
                entry.rename(aside / "entry")
                shutil.rmtree(aside, ignore_errors=True)
        library = _open(entry)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if library is None:
        raise KernelError(f"the compiled kernels in {entry} do not load: delete that folder and try again")
    return library


def _private(command: list[str], name: str, text: str | None, why: OSError) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="colibri-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.warn(
        f"the kernel cache {cache_dir() / 'kernels'} cannot be used ({why}); compiling into {folder} for this process "
        "(COLIBRI_CACHE names another folder)",
        RuntimeWarning,
        stacklevel=5,
    )
    (folder / name).mkdir()
    _compile(command, folder / name, text)
    library = _open(folder / name)
    if library is None:
        raise KernelError(f"the kernels compiled into {folder} do not load; is that folder mounted noexec?")
    return library


def _compile(command: list[str], folder: Path, text: str | None) -> None:
    target = folder / LIBRARY
    try:
        done = subprocess.run(
            [*command, "-o", str(target), "-lm"],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise KernelError(f"cannot run the C compiler {command[0]}: {error}") from error
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise KernelError(f"{command[0]} could not compile the kernels ({' '.join(command[1:])}):\n{tail}")
    (folder / DIGEST).write_text(hashlib.sha256(target.read_bytes()).hexdigest())


def _open(entry: Path) -> ctypes.CDLL | None:
    """The library of a cache entry; None where there is none, or it is damaged or not ours."""
    try:
        if not all(_trusted(path) for path in (entry, entry / LIBRARY, entry / DIGEST)):
            return None
        digest = hashlib.sha256(
            (entry / LIBRARY).read_bytes()
        ).hexdigest()  # a truncated library would crash the process
        if digest != (entry / DIGEST).read_text():
            return None
        return ctypes.CDLL(str(entry / LIBRARY))
    except OSError:
        return None


def _own_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not _trusted(folder):
        raise PermissionError(f"{folder} belongs to another user or is writable by others")
    return folder


def _trusted(path: Path) -> bool:
    """Ours or root's, and nobody else may write to it: what is loaded from it runs in this process."""
    info = path.stat()
    return info.st_uid in (os.getuid(), 0) and not info.st_mode & 0o022


def _key(command: list[str]) -> str:
    """Content of the sources, flags, compiler and machine."""
    digest = hashlib.sha256()
    for path in sorted(source().parent.iterdir()):
        if path.suffix in (".c", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise KernelError(f"cannot run the C compiler {command[0]}: {error}") from error
    for part in (" ".join(command), platform.system(), platform.machine()):
        digest.update(part.encode() + b"\0")
    digest.update(version)
    return digest.hexdigest()[:20]
