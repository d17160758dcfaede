"""model.colibri: opening it, and knowing where everything lies.

See plan.py for what it holds, writer.py for how it is made.
"""

from __future__ import annotations

import hashlib
import html
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops.layout import PAGE, MatrixLayout
from ..ops.pack import unpack
from ..ops.types import F32, ModelWeights
from .errors import ModelError
from .header import Header, read_exactly, read_header
from .jsonfile import check_present, dumps, parse_object
from .plan import CHECKSUMS, Piece, checksums_name, expert_name, make_plan
from .residents import load_weights
from .spec import ModelSpec
from .writer import FORMAT, VERSION, metadata_checksum, write_model

__all__ = ["FILE_NAME", "ModelError", "ModelFile", "write_model"]

FILE_NAME = "model.colibri"
_AGAIN = "convert the model again"


class ModelFile:
    """An open model file whose header has been checked; experts and residents are read when asked for.

    Stays right when the file is replaced while open (the old contents are kept by the open descriptor).
    """

    def __init__(self, path: Path, fd: int, positions: int | None = None) -> None:
        self.path, self._fd = path, -1  # ours to close only once all is checked
        header = read_header(fd, str(path))
        metadata = _metadata(header, str(path))
        self.quantize, self.identity, self.source = metadata["quantize"], metadata["identity"], metadata["source"]
        self.spec = ModelSpec.from_json(parse_object(metadata["spec"].encode(), f"{path}: spec"), f"{path}: spec")
        if positions is not None:
            self.spec = replace(self.spec, max_positions=positions)
        self._plan = make_plan(self.spec, self.quantize, _group(metadata, path), f"{path}: quantize")
        self.group = self._plan.group
        self._entries = _checked_entries(header, self._plan.tensor_count, self._plan, str(path))
        self._sums: dict[int, NDArray[np.uint32]] = {}
        self._fd = fd

    @classmethod
    def open(cls, path: Path | str, positions: int | None = None) -> ModelFile:
        """Open a .colibri file, or the one in a folder. positions: another context length than the model's.

        ModelError: one line that names the file, the tensor and the way out.
        """
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        check_present(path)
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened ({error.strerror})") from error
        try:
            return cls(path, fd, positions)
        except BaseException:
            os.close(fd)
            raise

    @property
    def expert_layout(self) -> tuple[MatrixLayout, MatrixLayout, MatrixLayout]:
        """gate, up, down of every routed expert in its run of pages."""
        return self._plan.expert_layout

    @property
    def expert_pages(self) -> int:
        """G, the pages of one routed expert."""
        return self._plan.expert_pages

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self._plan.all_expert_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that `weights()` allocates: the resident tensors and the rotary tables."""
        return self._plan.resident_bytes

    def extent(self, layer: int, expert: int) -> tuple[int, int]:
        """(offset in the file, bytes) of one expert; both multiples of 64 KiB. KeyError: no such routed expert."""
        begin, end = self._entries[expert_name(layer, expert)]
        return begin, end - begin

    def expert(self, layer: int, expert: int) -> tuple[F32, F32, F32]:
        """(gate, up, down) of one routed expert as the float32 values that its pages hold. KeyError: no such expert."""
        begin, size = self.extent(layer, expert)
        run = np.frombuffer(read_exactly(self.fileno(), begin, size, str(self.path)), np.uint8)
        gate, up, down = (unpack(run, layout) for layout in self.expert_layout)
        return gate, up, down

    def checksums(self, layer: int, expert: int) -> NDArray[np.uint32]:
        """zlib.crc32 of each page of one expert, uint32 [G]. KeyError: no such routed expert."""
        if expert_name(layer, expert) not in self._entries:
            raise KeyError(f"layer {layer} has no routed expert {expert}")
        if layer not in self._sums:
            begin, end = self._entries[checksums_name(layer)]
            table = np.frombuffer(read_exactly(self._fd, begin, end - begin, str(self.path)), np.uint32)
            self._sums[layer] = table.reshape(self.spec.experts, self.expert_pages)
        sums: NDArray[np.uint32] = self._sums[layer][expert]
        return sums

    def weights(self) -> ModelWeights:
        """All resident weights in fresh memory, checked against their checksums. ModelError names a damaged tensor."""
        begin, end = self._entries[CHECKSUMS]
        sums = np.frombuffer(read_exactly(self._fd, begin, end - begin, str(self.path)), np.uint32)
        return load_weights(self._plan, self._fd, str(self.path), self._entries, sums)

    def digest(self) -> str:
        """64 hex digits over the facts and all checksums: what the weights are, wherever they came from."""
        digest = hashlib.sha256(f"{dumps(self.spec.to_json())} {self.quantize} {self.group}".encode())
        for name, (begin, end) in sorted(self._entries.items()):
            if name.endswith(CHECKSUMS):
                digest.update(read_exactly(self._fd, begin, end - begin, str(self.path)))
        return digest.hexdigest()

    def fileno(self) -> int:
        """The open descriptor, for reads of `extent`s; valid until close()."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    def close(self) -> None:
        """Close the file; idempotent. Weights that were loaded stay valid."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _facts(self) -> list[tuple[str, str]]:
        spec, sparse = self.spec, len(self.spec.sparse_layers)
        quantisation = self.quantize + (f", groups of {self.group}" if self.group else "")
        dense = f", {spec.layers - sparse} dense" if sparse < spec.layers else ""
        return [
            ("model", f"{self.source or self.path.parent.name} ({spec.family})"),
            ("layers", f"{spec.layers}{dense}"),
            (
                "experts",
                f"{spec.experts} a layer, {spec.top_k} per token" + (", one shared" if spec.shared_ffn else ""),
            ),
            ("widths", f"hidden {spec.hidden_size}, expert {spec.expert_ffn}, vocabulary {spec.vocab_size}"),
            ("attention", f"{spec.heads} heads of {spec.head_dim}, {spec.kv_heads} key/value heads"),
            ("positions", str(spec.max_positions)),
            ("stored as", quantisation),
            ("one expert", f"{self.expert_pages * PAGE / 2**20:.2f} MiB in {self.expert_pages} pages"),
            ("all experts", f"{self.expert_bytes / 2**20:.1f} MiB"),
            ("resident", f"{self.resident_bytes / 2**20:.1f} MiB"),
        ]

    def __repr__(self) -> str:
        return f"ModelFile({self.path.name}: " + ", ".join(f"{name} {value}" for name, value in self._facts()[:3]) + ")"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{n}</th><td>{html.escape(v)}</td></tr>" for n, v in self._facts()
        )
        return f"<table><caption>{html.escape(self.path.name)}</caption>{rows}</table>"


def _metadata(header: Header, path: str) -> dict[str, str]:
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise ModelError(f"{path}: is no model file of this engine: run colibri-lab convert on its folder first")
    if metadata.get("version") != str(VERSION):
        raise ModelError(
            f"{path}: format version {metadata.get('version')!r:.20}, this version reads {VERSION}: {_AGAIN}"
        )
    for key in ("spec", "quantize", "group", "identity", "source", "checksum"):
        if key not in metadata:
            raise ModelError(f"{path}: __metadata__ lacks {key}: {_AGAIN}")
    if metadata["checksum"] != metadata_checksum(metadata):
        raise ModelError(f"{path}: __metadata__ does not match its checksum: damaged, {_AGAIN}")
    return metadata


def _group(metadata: dict[str, str], path: Path) -> int:
    text = metadata["group"]
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ModelError(f"{path}: group {text!r:.20} is not a number: {_AGAIN}")
    return int(text)


def _checked_entries(header: Header, count: int, plan: Any, path: str) -> dict[str, tuple[int, int]]:
    """name -> (begin, end) of every tensor of the plan; the header must hold these and no others."""
    if header.data_start % PAGE:
        raise ModelError(f"{path}: data begins at byte {header.data_start}, not at a page of {PAGE}: {_AGAIN}")
    if count > len(header.entries):
        raise ModelError(f"{path}: has {len(header.entries)} tensors, its spec wants {count}: {_AGAIN}")
    found: dict[str, tuple[int, int]] = {}
    for piece in plan.tensors():
        entry = header.entries.get(piece.name)
        _check_piece(piece, entry, path)
        assert entry is not None
        found[piece.name] = (entry.begin, entry.end)
    if len(found) != len(header.entries):
        extra = next(name for name in header.entries if name not in found)
        raise ModelError(f"{path}: tensor {extra!r:.200} is not part of this model: {_AGAIN}")
    return found


def _check_piece(piece: Piece, entry: Any, path: str) -> None:
    where = f"{path}: tensor {piece.name!r}"
    if entry is None:
        raise ModelError(f"{where} is missing: {_AGAIN}")
    if entry.dtype != piece.dtype or entry.shape != piece.shape:
        raise ModelError(
            f"{where} is {entry.dtype} {list(entry.shape)}, the spec wants {piece.dtype} {list(piece.shape)}: {_AGAIN}"
        )
    if piece.dtype == "U8" and entry.begin % PAGE:
        raise ModelError(f"{where} begins at byte {entry.begin}, not at a page of {PAGE}: {_AGAIN}")
