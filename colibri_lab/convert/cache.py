"""Converted models in the user's cache folder: made once per source, quantisation and version, whoever comes first."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from .. import paths
from ..model.errors import ModelError
from ..model.jsonfile import check_present
from ..model.plan import make_plan
from ..model.store import FILE_NAME, ModelFile
from ..model.writer import VERSION
from .checkpoint import Checkpoint, weight_files
from .checks import read_facts
from .lock import Lock
from .run import Progress, convert, source_name, tokenizer_files

SAMPLES, SAMPLE = 16, 4096  # of each weight file, spread evenly: a retrained model differs in them


def ensure_converted(
    folder: Path | str, quantize: str = "int4", group_size: int = 32, *, progress: bool | Progress | None = None
) -> Path:
    """The folder under the cache with `folder` converted.

    Made now, with a progress bar on a terminal, if it is not there.

    Two processes may ask at once: one converts, the other waits and uses it. A damaged cache entry is made again.
    ModelError: what `convert` refuses, or a cache folder that cannot be written (COLIBRI_CACHE names another).
    """
    source = Path(folder)
    with Checkpoint(source) as checkpoint:
        make_plan(read_facts(checkpoint, None), quantize, group_size)
    group = group_size if quantize in ("int8", "int4") else 0
    home = paths.cache_dir() / "models"
    out = home / f"{_plain(source_name(source))}-{quantize}{f'-g{group}' if group else ''}-{source_key(source)[:16]}"
    if _usable(out):
        return out
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = Lock(home / f".{out.name}.lock")
        lock.acquire()
    except OSError as error:
        raise ModelError(
            f"{home}: converted models cannot be kept there ({error.strerror}): set COLIBRI_CACHE "
            f"to a folder that can be written, "
            "or run colibri-lab convert and load its output"
        ) from error
    try:
        if not _usable(out):  # else another process has just made it
            shown = sys.stderr.isatty() if progress is None else progress
            convert(source, out, quantize=quantize, group_size=group or 32, progress=shown, overwrite=True)
    finally:
        lock.release()
    return out


def source_key(folder: Path) -> str:
    """A name for what a folder holds now, 64 hex digits: small files whole, weight files by size, time and samples."""
    digest = hashlib.sha256(f"{VERSION}\0{folder.resolve()}\0".encode(errors="surrogateescape"))
    for path in [folder / "config.json", *tokenizer_files(folder)]:
        digest.update(f"{path.name}\0{check_present(path)}\0".encode())
        digest.update(path.read_bytes())
    for name in weight_files(folder):
        path = folder / name
        size = check_present(path)
        digest.update(f"{name}\0{size}\0{path.stat().st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            for index in range(SAMPLES):
                file.seek(size * index // SAMPLES)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _usable(out: Path) -> bool:
    if not os.path.lexists(out / FILE_NAME):
        return False
    try:
        ModelFile.open(out).close()
    except ModelError:
        return False
    return True


def _plain(name: str) -> str:
    """A name that any file system takes."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".")[:60] or "model"
