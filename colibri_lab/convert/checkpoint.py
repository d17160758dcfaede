"""A Hugging Face model folder: its config, and any rows of any tensor as float32, read one piece at a time.

Files are opened by the path they are found under, never resolved first: in a Hub cache they are links into a folder
of blobs whose names mean nothing, and siblings must be looked up beside the link.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.errors import ModelError
from ..model.header import Entry, read_exactly, read_header
from ..model.jsonfile import check_present, read_object

F32 = NDArray[np.float32]
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


class Checkpoint:
    """An open checkpoint; all headers are checked, no weight has been read yet. Close it, or use it in `with`."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._fds: dict[str, int] = {}
        self._where: dict[str, tuple[int, Entry, Path]] = {}
        self._sum, self._lock = 0, threading.Lock()
        if not self.folder.is_dir():
            hint = "pass the folder that holds it" if self.folder.is_file() else "no such folder"
            raise ModelError(f"{self.folder}: is not a model folder: {hint}")
        self.config_path = self.folder / "config.json"
        if (self.folder / "snapshots").is_dir() and not self.config_path.exists():
            raise ModelError(f"{self.folder}: is a Hub cache entry: pass one of the folders under its snapshots/")
        self.config = read_object(self.config_path)
        generation = self.folder / "generation_config.json"
        self.generation = read_object(generation) if os.path.lexists(generation) else {}

    def open_weights(self) -> None:
        """Open all weight files and check their headers. ModelError names the file that is missing, cut or a pickle."""
        for name in weight_files(self.folder):
            path = self.folder / name
            check_present(path)
            try:
                fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise ModelError(f"{path}: cannot be opened ({error.strerror})") from error
            self._fds[name] = fd
            for tensor, entry in read_header(fd, str(path)).entries.items():
                if tensor in self._where:
                    raise ModelError(f"{path}: tensor {tensor!r:.200} is also in {self._where[tensor][2].name}")
                self._where[tensor] = (fd, entry, path)
        self._check_index()

    def _check_index(self) -> None:
        for tensor, file in index_of(self.folder).items():
            if tensor not in self._where:
                raise ModelError(f"{self.folder / file}: tensor {tensor!r:.200} is missing, {INDEX} says it is there")

    @property
    def tensors(self) -> dict[str, Entry]:
        """All tensors by name."""
        return {name: entry for name, (_, entry, _) in self._where.items()}

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return self._where[tensor][1].shape

    def path_of(self, tensor: str) -> Path:
        """The file that holds a tensor, or the folder when none does."""
        return self._where[tensor][2] if tensor in self._where else self.folder

    def read(self, tensor: str, first: int, count: int, cols: int) -> F32:
        """`count` rows of `cols` values from row `first`, float32 [count, cols].

        The tensor is seen as rows one after another.

        bf16 is widened bit by bit, so that subnormals survive. ModelError: file cut while open; NaN or Infinity among
        them.
        """
        fd, entry, path = self._where[tensor]
        item = FLOATS[entry.dtype]
        raw = read_exactly(fd, entry.begin + first * cols * item, count * cols * item, str(path))
        self._note_rows(f"{tensor} {entry.dtype} {entry.shape}", first, raw, count)
        if entry.dtype == "BF16":
            wide = np.frombuffer(raw, "<u2").astype(np.uint32)
            wide <<= 16
            values = wide.view(np.float32)
        elif entry.dtype == "F16":
            values = np.frombuffer(raw, "<f2").astype(np.float32)
        else:
            values = np.frombuffer(raw, "<f4").astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ModelError(f"{path}: tensor {tensor!r} holds NaN or Infinity: the checkpoint is damaged")
        return values.reshape(count, cols)

    def note(self, text: str) -> None:
        """Make a text part of the identity."""
        self._add(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))

    def _note_rows(self, text: str, first: int, raw: bytearray, count: int) -> None:
        """Make rows part of the identity, each by itself, so that neither the order nor the size of reads matters."""
        head, width, total = hashlib.sha256(text.encode()), len(raw) // count, 0
        view = memoryview(raw)
        for row in range(count):
            digest = head.copy()
            digest.update(b"".join(((first + row).to_bytes(8, "big"), view[row * width : (row + 1) * width])))
            total += int.from_bytes(digest.digest(), "big")
        self._add(total)

    def _add(self, number: int) -> None:
        with self._lock:
            self._sum = (self._sum + number) % (1 << 256)

    def identity(self) -> str:
        """The name of this source, 64 hex digits: out of the SHA-256 of every row read and every text noted so far.

        A sum over rows: reading a row twice counts twice, so every conversion must read the same rows equally often.
        """
        return hashlib.sha256(self._sum.to_bytes(32, "big")).hexdigest()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def index_of(folder: Path) -> dict[str, str]:
    """tensor -> file of the index; empty when there is a single file, or no index."""
    path = folder / INDEX
    if os.path.lexists(folder / SINGLE) or not os.path.lexists(path):
        return {}
    listed: Any = read_object(path).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise ModelError(f"{path}: has no weight_map from tensors to files")
    for file in set(listed.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}: weight_map names {file!r:.80}, which is not a .safetensors file beside it")
    return listed


def weight_files(folder: Path) -> list[str]:
    """Names of a folder's weight files: model.safetensors, else what the index lists, else all *.safetensors."""
    if os.path.lexists(folder / SINGLE):
        return [SINGLE]
    if listed := index_of(folder):
        names = sorted(set(listed.values()))
        missing = [name for name in names if not os.path.lexists(folder / name)]
        if missing:
            raise ModelError(
                f"{folder / missing[0]}: missing ({len(missing)} of {len(names)} shards are): fetch the model again"
            )
        return names
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder / pickles[0]}: pickle weights can run code when read and are refused; "
                f"make safetensors of them with "
                "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise ModelError(f"{folder}: holds no weights ({SINGLE} or {INDEX} with its shards)")
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, count = match[1], int(match[3])
            for number in range(1, min(count, 100_000) + 1):
                shard = f"{stem}-{number:05d}-of-{match[3]}.safetensors"
                if shard not in names:
                    raise ModelError(
                        f"{folder / shard}: missing, {name} says there are {count} shards: fetch the model again"
                    )
    return names
