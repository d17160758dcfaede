"""Processes that start as an installed program does: compiled modules are there, and what is missing is kept."""

from __future__ import annotations

import os

from colibri_lab.paths import cache_dir


def environment() -> dict[str, str]:
    """This process's, with a folder of the cache for compiled modules, whatever it says about writing them.

    A shell may forbid Python to keep compiled modules (PYTHONDONTWRITEBYTECODE); all of ours would then be compiled at
    each start, which costs more than all else that a start does, while a peer's were compiled when it was installed.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(cache_dir() / "bench" / "compiled")}
