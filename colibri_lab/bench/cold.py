"""Files that are not in memory: what a first use of the day finds."""

from __future__ import annotations

import os
from pathlib import Path


def forget(path: Path) -> None:
    """Drop a file's pages from the page cache. ValueError where the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        raise ValueError("this system has no posix_fadvise: files cannot be made cold")
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are still to be written stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
