"""The folder of stored prefixes: what is there, which begins like a prompt, how much room is left.

A prefix is two files of one random name: NAME.kv has the blocks, NAME.index (persist_format.py) says what they are. The
index is renamed into place after the blocks are on the disk, so a name is whole or does not count. Whoever writes
NAME.kv holds a lock on it, and the system lets go of it when a process dies: what is unlocked and has no index is
nobody's. Readers need no lock: bytes that an index names never change, and a removed file lives on where it is mapped.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..model.writer import sync_folder
from .persist_files import is_at, lock, open_new, open_plain, read_all, write_whole
from .persist_format import HEAD, Index, Layout, Refused, head_bytes, read_head, read_index

LEAST = 16  # tokens that are worth a file, and by which a stored prefix must have grown to be stored again
_OURS = re.compile(r"(prefix-[0-9a-f]{16})\.(kv|index|index\.new)")
Stamp = tuple[int, int, int]


@dataclass(eq=False)
class Stored:
    """One prefix. packed: its index, while that is not on the disk yet. users: running sequences that mapped it."""

    name: str
    tokens: NDArray[np.int32]
    packed: bytes | None = None
    users: int = 0


@dataclass
class Folder:
    """Made by `Folder.open`. refused: file -> why it is not used, for those that are of our format or name."""

    path: Path
    quota: int | None
    layout: Layout
    stored: dict[str, Stored] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    _starts: dict[int, dict[str, Stored]] = field(default_factory=dict)
    _seen: dict[str, Stamp] = field(default_factory=dict)
    _changed: int = -1

    @classmethod
    def open(cls, path: Path, quota: int | None, layout: Layout) -> Folder:
        """The folder, made if it is missing, without what dead processes left behind. OSError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = cls(path.absolute(), quota, layout)
        folder._sweep()
        folder.refresh()
        return folder

    def refresh(self) -> None:
        """Look again, if something changed: other processes store and remove prefixes too."""
        changed = os.stat(self.path).st_mtime_ns
        if changed == self._changed:
            return
        self._changed = changed
        there = {name: info for name, end, info in self._files() if end == "index"}
        for name in [n for n, s in self.stored.items() if n not in there and s.packed is None]:
            self._forget(name)
        self._seen = {name: stamp for name, stamp in self._seen.items() if name in there}
        self.refused = {file: why for file, why in self.refused.items() if file.removesuffix(".index") in there}
        for name, info in there.items():
            stamp = (info.st_ino, info.st_mtime_ns, info.st_size)
            mine = self.stored.get(name)
            if self._seen.get(name) == stamp or (mine is not None and mine.packed is not None):
                continue
            self._seen[name] = stamp
            try:
                self._keep(name, self._head(name))
            except Refused as error:
                self.refuse(name, error)
            except OSError:  # removed meanwhile
                self._forget(name)

    def find(self, ids: NDArray[np.int32]) -> tuple[Stored | None, int]:
        """The prefix that begins with most of `ids`, and with how many: at least LEAST, else (None, 0)."""
        best: tuple[Stored | None, int] = (None, 0)
        if len(ids) < LEAST:
            return best
        for stored in self._starts.get(start_key(ids), {}).values():
            most = min(len(ids), len(stored.tokens))
            same = stored.tokens[:most] == ids[:most]  # the key only narrows the choice: tokens decide
            common = most if same.all() else int(same.argmin())
            whole = common == len(stored.tokens)  # one that ends there can be made longer in place
            if common >= LEAST and (common > best[1] or (common == best[1] and whole)):
                best = stored, common
        return best

    def load(self, stored: Stored) -> tuple[Index, int]:
        """(its index, the open data file). Refused."""
        fd = -1
        try:
            fd = self._open(f"{stored.name}.kv")
            size = os.fstat(fd).st_size
            data = stored.packed if stored.packed is not None else self._read(f"{stored.name}.index")
            index = read_index(data, self.layout, size)
        except (Refused, OSError) as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, Refused):
                raise
            if isinstance(error, FileNotFoundError):  # another process has evicted it
                raise Refused("gone", "is not there any more") from None
            raise Refused("damaged", f"cannot be read ({error.strerror})") from None
        with suppress(OSError):  # in a folder that is read only nothing is evicted either
            os.utime(self.path / f"{stored.name}.index")
        return index, fd

    def refuse(self, name: str, why: Refused) -> None:
        """Do not offer it again unless its files change, and say why."""
        self._forget(name)
        self.refusals[why.kind] += 1
        if why.kind != "gone":
            self.refused[f"{name}.index"] = why

    def create(self) -> tuple[str, int]:
        """(name, descriptor) of a new locked data file. OSError."""
        while True:
            name = f"prefix-{secrets.token_hex(8)}"
            fd = open_new(self.path / f"{name}.kv")
            if lock(fd) and is_at(fd, self.path / f"{name}.kv"):
                return name, fd
            os.close(fd)  # somebody took it for a dead process's before we had the lock

    def claim(self, stored: Stored, size: int) -> int:
        """The data file of a prefix whose index has `size` bytes, to make it longer.

        -1 when somebody writes there, has made it longer since its index was read, or nobody may.
        """
        path = self.path / f"{stored.name}.kv"
        try:
            fd = open_plain(path, write=True)
        except OSError:
            return -1
        with suppress(OSError):
            if lock(fd) and is_at(fd, path) and os.stat(path.with_suffix(".index")).st_size == size:
                return fd
        os.close(fd)
        return -1

    def keep(self, name: str, index: Index) -> Stored:
        """Offer a prefix from now on; it is on the disk after `publish`."""
        return self._keep(name, index.tokens, index.pack(self.layout))

    def publish(self, name: str, packed: bytes, fd: int) -> None:
        """Make data and index last through a crash, whole or not at all. OSError. Any thread."""
        os.fsync(fd)
        write_whole(self.path / f"{name}.index", packed)
        sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Index first: without it the rest is nobody's. What cannot be removed stays."""
        self._forget(name)
        for end in ("index", "index.new", "kv"):
            with suppress(OSError):
                os.unlink(self.path / f"{name}.{end}")

    def make_room(self, need: int) -> bool:
        """Whether `need` bytes more keep the folder in its quota, after removing what was used longest ago."""
        if self.quota is None:
            return True
        sizes: dict[str, int] = {}
        used: dict[str, int] = {}
        for name, end, info in self._files():
            sizes[name] = sizes.get(name, 0) + info.st_blocks * 512
            if end == "index":
                used[name] = info.st_mtime_ns
        for name in sorted(used, key=lambda n: used[n]):
            if sum(sizes.values()) + need <= self.quota:
                break
            mine = self.stored.get(name)
            if mine is not None and (mine.users or mine.packed is not None):
                continue
            if self._abandoned(name):
                self.remove(name)
                self.evicted += 1
                del sizes[name]
        return sum(sizes.values()) + need <= self.quota

    def _sweep(self) -> None:
        """Remove what has no index and no living writer."""
        ends: dict[str, set[str]] = {}
        for name, end, _ in self._files():
            ends.setdefault(name, set()).add(end)
        for name, found in ends.items():
            if "index" not in found or "kv" not in found:
                if self._abandoned(name):
                    self.remove(name)
            elif "index.new" in found and self._abandoned(name):
                with suppress(OSError):
                    os.unlink(self.path / f"{name}.index.new")

    def _abandoned(self, name: str) -> bool:
        """Whether nobody writes the data file of this name."""
        try:
            fd = self._open(f"{name}.kv")
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            return lock(fd)
        finally:
            os.close(fd)

    def _files(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """(name, end, facts) of our files: plain ones that are named as we name them."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _OURS.fullmatch(entry.name)
                with suppress(FileNotFoundError):
                    if match and stat.S_ISREG((info := entry.stat(follow_symlinks=False)).st_mode):
                        yield match[1], match[2], info

    def _head(self, name: str) -> NDArray[np.int32]:
        fd = self._open(f"{name}.index")
        try:
            start = read_all(fd, HEAD.size, 0)
            size = head_bytes(start, os.fstat(fd).st_size, self.layout)
            return read_head(start + read_all(fd, size - HEAD.size, HEAD.size), self.layout).tokens
        finally:
            os.close(fd)

    def _read(self, file: str) -> bytes:
        fd = self._open(file)
        try:
            size = os.fstat(fd).st_size
            head_bytes(read_all(fd, HEAD.size, 0), size, self.layout)  # before as much is read as it says
            return read_all(fd, size, 0)
        finally:
            os.close(fd)

    def _open(self, file: str) -> int:
        return open_plain(self.path / file)

    def _keep(self, name: str, tokens: NDArray[np.int32], packed: bytes | None = None) -> Stored:
        mine = self.stored.setdefault(name, Stored(name, tokens))
        self._starts.get(start_key(mine.tokens), {}).pop(name, None)
        mine.tokens, mine.packed = tokens, packed
        self.refused.pop(f"{name}.index", None)
        self._starts.setdefault(start_key(tokens), {})[name] = mine
        return mine

    def _forget(self, name: str) -> None:
        mine = self.stored.pop(name, None)
        if mine is not None:
            self._starts[start_key(mine.tokens)].pop(name, None)


def start_key(ids: NDArray[np.int32]) -> int:
    """What prefixes are looked up by: the same in every process, and never trusted."""
    return zlib.crc32(ids[:LEAST].astype("<i4").tobytes())
