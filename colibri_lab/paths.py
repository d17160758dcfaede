"""Where the things that travel with the package lie, from a checkout and from an installed wheel alike.

A wheel carries `kernels/` as `colibri_lab/_kernels` and `data/tiny-moe` as `colibri_lab/_data/tiny-moe`;
a checkout has them beside the package. Nothing here creates a folder: a caller that writes makes its own.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_TOP = _PACKAGE.parent


def _carried(packaged: str, checkout: str, what: str) -> Path:
    """The packaged copy where there is one, else the checkout's; FileNotFoundError names both places."""
    places = (_PACKAGE / packaged, _TOP / checkout)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{what} not found: looked in {places[0]} and {places[1]}; install colibri-lab again")


def file_to_write(path: str | os.PathLike[str]) -> Path:
    """`path`, where a new file may be renamed to. OSError that names it for a folder, a device or a pipe."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to write", str(target))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "is a device or a pipe, which a file would replace", str(target))
    return target


def kernels_dir() -> Path:
    """The folder of kernel sources: `cpu/`, `cuda/`."""
    return _carried("_kernels", "kernels", "kernel sources")


def embedded_model() -> Path:
    """The folder of the embedded model, in Hugging Face format (see its CARD.md)."""
    return _carried("_data/tiny-moe", "data/tiny-moe", "the embedded model")


def cache_dir() -> Path:
    """The user's cache folder for compiled kernels, converted models and benchmark files.

    `COLIBRI_CACHE` overrides it; the folder may not exist yet.
    """
    chosen = os.environ.get("COLIBRI_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_dir  # imported late: not needed where COLIBRI_CACHE is set

    return Path(user_cache_dir("colibri-lab", appauthor=False))
