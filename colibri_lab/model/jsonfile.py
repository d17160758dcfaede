"""JSON as it is found in the wild, and strict JSON as we write it.

Found: a UTF-8 byte order mark, CRLF, bare NaN and Infinity. Written: none of these (RFC 8259), so that any reader
takes it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from .errors import ModelError

LARGEST = 64 << 20  # bytes; index files of the largest models have a few MiB


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. ModelError when it is missing, a dangling link, empty, not JSON or not an object."""
    data = read_bytes(path, LARGEST)
    return parse_object(data, str(path))


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `data`; `source` names it in errors."""
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source}: not JSON ({_one_line(error)})") from None
    if not isinstance(found, dict):
        raise ModelError(f"{source}: holds {type(found).__name__}, not a JSON object")
    return found


def read_bytes(path: Path, largest: int) -> bytes:
    """All bytes of a file of a model folder, with the messages of `check_present`."""
    size = check_present(path)
    if size > largest:
        raise ModelError(f"{path}: {size} bytes are more than such a file can have ({largest})")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


def check_present(path: Path) -> int:
    """Size of a file.

    ModelError says whether it is missing, a link to nothing (as in a Hub cache), empty or unreadable.
    """
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ModelError(
                f"{path}: links to {os.readlink(path)}, which is not there: the download is incomplete, fetch it again"
            ) from None
        raise ModelError(f"{path}: not there") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not path.is_file():
        raise ModelError(f"{path}: is not a file")
    if size == 0:
        raise ModelError(f"{path}: is empty: the download is incomplete, fetch it again")
    return size


def strict(value: Any) -> Any:
    """`value` with what strict JSON cannot say (NaN, Infinity) replaced by None, however deep."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON text; ValueError for NaN or Infinity (pass it through `strict` first)."""
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=True)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
