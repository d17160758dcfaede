"""Files that are there whole or not at all: written beside their place, synced, renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from colibri_lab.paths import file_to_write


def write(path: str | os.PathLike[str], data: bytes | Iterable[bytes]) -> Path:
    """Writes `data`, in one piece or many, and returns the path. OSError names `path` where it cannot be written."""
    target = file_to_write(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target
