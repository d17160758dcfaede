"""The head of a safetensors file, held to be hostile until every number in it has been checked against the file.

A file is 8 bytes (little-endian length n of the header), n bytes of JSON, then the data. The header maps a tensor's
name to {"dtype", "shape", "data_offsets": [begin, end]} (offsets from the start of the data) and may hold
"__metadata__", text to text. As the format demands: ranges follow each other without holes or overlap from the first
byte of the data to the last.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from .errors import ModelError

LARGEST_HEADER = 64 << 20  # the largest models' headers have some 20 MiB when all is in one file
LARGEST_RANK = 8
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: begin and end are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """All tensors of a file, the free text, and where the data begins."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


def read_header(fd: int, path: str) -> Header:
    """Header of an open file. ModelError, naming `path` and the tensor, before anything large is allocated."""
    size = os.fstat(fd).st_size
    if size < 8:
        raise ModelError(f"{path}: {size} bytes are no safetensors file: truncated?")
    length = int.from_bytes(read_exactly(fd, 0, 8, path), "little")
    if length > size - 8:
        raise ModelError(f"{path}: header claims {length} bytes, the file has {size}: truncated or no safetensors file")
    if not 2 <= length <= LARGEST_HEADER:
        raise ModelError(f"{path}: a header of {length} bytes is not believable (2 to {LARGEST_HEADER})")
    text = read_exactly(fd, 8, length, path)
    return parse_header(text, size, path)


def parse_header(text: bytes | bytearray, file_size: int, path: str) -> Header:
    """`read_header` on the header's bytes alone."""
    start = 8 + len(text)
    if text[:1] != b"{":
        raise ModelError(f"{path}: the header is not a JSON object: no safetensors file")
    if text.count(b"[") + text.count(b"{") > len(text) // 8 + 16:  # a tensor takes over 50 bytes and three brackets
        raise ModelError(f"{path}: the header is nested in a way that no safetensors header is")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON ({' '.join(str(error).split())[:120]})") from None
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{path}: __metadata__ is not text to text")
    entries = {name: _entry(name, raw, start, path) for name, raw in found.items()}
    _check_ranges(entries, start, file_size, path)
    return Header(entries, metadata, start)


def _entry(name: str, raw: Any, start: int, path: str) -> Entry:
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(raw, dict):
        raise ModelError(f"{where} is not described by an object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"{where} has dtype {dtype!r:.40}, which is not known")
    if not isinstance(shape, list) or len(shape) > LARGEST_RANK or not all(_whole(size) for size in shape):
        raise ModelError(f"{where} has shape {shape!r:.80}, not a list of whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(at) for at in offsets):
        raise ModelError(f"{where} has data_offsets {offsets!r:.80}, not two whole numbers")
    bits, rest = divmod(math.prod(shape) * BITS[dtype], 8)
    if rest or bits != offsets[1] - offsets[0]:
        raise ModelError(
            f"{where}: {dtype} {shape} needs {bits} bytes, its range {offsets} has {offsets[1] - offsets[0]}"
        )
    return Entry(name, dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _check_ranges(entries: dict[str, Entry], start: int, file_size: int, path: str) -> None:
    at = start
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        where = f"{path}: tensor {entry.name!r:.200}"
        if entry.end > file_size:
            raise ModelError(
                f"{where} ends at byte {entry.end}, the file at {file_size}: truncated? fetch or convert it again"
            )
        if entry.begin < at:
            raise ModelError(f"{where} overlaps the one before it at byte {entry.begin}")
        if entry.begin > at:
            raise ModelError(
                f"{where} begins at byte {entry.begin}, {entry.begin - at} bytes after the one before it ends"
            )
        at = entry.end
    if at != file_size:
        raise ModelError(f"{path}: {file_size - at} bytes after the last tensor belong to none")


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twin = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ModelError(f"the header names {twin!r:.200} twice")
    return found


def _no_constant(name: str) -> Any:
    raise ModelError(f"the header holds {name}, which is not JSON")


def read_exactly(fd: int, offset: int, size: int, path: str) -> bytearray:
    """`size` bytes from `offset`; ModelError when the file ends before (replaced or cut while open)."""
    buffer = bytearray(size)
    read_into(fd, offset, memoryview(buffer), path)
    return buffer


def read_into(fd: int, offset: int, view: memoryview, path: str) -> None:
    """Fill `view` (bytes) from `offset` of the file."""
    done, size = 0, view.nbytes
    while done < size:
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read at byte {offset + done} ({error.strerror})") from error
        if got == 0:
            raise ModelError(
                f"{path}: ends at byte {offset + done}, {size - done} bytes too early: truncated while in use?"
            )
        done += got
