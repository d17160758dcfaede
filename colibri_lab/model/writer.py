"""Writing a model.colibri: streamed, under a temporary name, synced, renamed; one expert in memory at most."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..ops.layout import PAGE, ceil_div
from .errors import ModelError
from .jsonfile import dumps
from .plan import Piece, Plan, make_plan
from .spec import ModelSpec

FORMAT = "colibri"
VERSION = 1
U8 = NDArray[np.uint8]
Residents = Callable[[Piece], Iterable[NDArray[Any]]]
Experts = Callable[[int, int, U8], None]
Progress = Callable[[int, int], None]


def write_model(
    path: Path | str,
    spec: ModelSpec,
    quantize: str,
    group: int,
    residents: Residents,
    experts: Experts,
    *,
    identity: str | Callable[[], str] = "",
    source: str = "",
    progress: Progress | None = None,
) -> Path:
    """Write a model file, whole or not at all, and return its path.

    experts(layer, expert, out): fill `out`, uint8 [G, 65536] of zeros, in the layout that `make_plan(...)` says.
    residents(piece): the piece's bytes as arrays in order; for a matrix the packed run of pages, else plain values.
    identity: 64 hex digits that name the source; a function is asked after all data was read.
    progress(done, total): bytes written so far.
    On any error or interrupt the temporary file is removed and what was under `path` stays as it was. ModelError: disk
    full, file too large for the file system.
    """
    path, plan = Path(path), make_plan(spec, quantize, group)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            try:
                _write(file, plan, residents, experts, identity, source, progress)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise ModelError(f"{path}: cannot be written ({error.strerror})") from error
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def _write(
    file: BinaryIO,
    plan: Plan,
    residents: Residents,
    experts: Experts,
    identity: str | Callable[[], str],
    source: str,
    progress: Progress | None,
) -> None:
    total, done = plan.data_bytes, 0
    file.write(header_bytes(plan, "0" * 64, source))

    def put(data: U8) -> None:
        nonlocal done
        file.write(data.data)
        done += len(data)
        if progress is not None:
            progress(done, total)

    sums: list[U8] = []
    run = np.empty((plan.expert_pages, PAGE), np.uint8)
    for layer in plan.spec.sparse_layers:
        table = np.zeros((plan.spec.experts, plan.expert_pages), np.uint32)
        for expert in range(plan.spec.experts):
            run[:] = 0
            experts(layer, expert, run)
            table[expert] = [zlib.crc32(page.data) for page in run]
            put(run.reshape(-1))
        sums.append(table.reshape(-1).view(np.uint8))
    wide = [piece for piece in plan.residents if piece.dtype != "F16"]
    own = np.zeros(len(plan.residents), np.uint32)
    for index, piece in enumerate(wide):
        own[index] = _put_piece(piece, residents(piece), put)
    at = file.tell()
    for column in [*sums, own.view(np.uint8)]:
        put(column)
    for index, piece in enumerate(plan.residents[len(wide) :], len(wide)):
        own[index] = _put_piece(piece, residents(piece), put)
    file.seek(at + sum(len(column) for column in sums))
    file.write(own.data)
    file.seek(0)
    file.write(header_bytes(plan, identity() if callable(identity) else identity or "0" * 64, source))


def _put_piece(piece: Piece, chunks: Iterable[NDArray[Any]], put: Callable[[U8], None]) -> int:
    """Write a resident tensor; its crc32."""
    checksum = done = 0
    for chunk in chunks:
        data = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(data.data, checksum)
        done += len(data)
        put(data)
    if done != piece.nbytes:
        raise ValueError(f"{piece.name} was given {done} bytes, it takes {piece.nbytes}")
    return checksum


def header_bytes(plan: Plan, identity: str, source: str) -> bytes:
    """Length, JSON header and the spaces that make the data begin at a page.

    Same length for any identity of 64 characters.
    """
    if len(identity) != 64:
        raise ValueError(f"an identity has 64 characters, not {len(identity)}")
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "quantize": plan.quantize,
        "group": str(plan.group),
        "identity": identity,
        "source": source,
        "spec": dumps(plan.spec.to_json()),
    }
    metadata["checksum"] = metadata_checksum(metadata)
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for piece in plan.tensors():
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [at, at + piece.nbytes]}
        at += piece.nbytes
    text = dumps(header).encode()
    start = ceil_div(8 + len(text), PAGE) * PAGE
    return (start - 8).to_bytes(8, "little") + text + b" " * (start - 8 - len(text))


def metadata_checksum(metadata: dict[str, str]) -> str:
    """crc32 over all of the metadata but itself, eight hex digits."""
    text = "\n".join(f"{key}={value}" for key, value in sorted(metadata.items()) if key != "checksum")
    return f"{zlib.crc32(text.encode()):08x}"


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the file system allows it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some network file systems cannot sync folders: the rename is still whole or not at all
        return
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
