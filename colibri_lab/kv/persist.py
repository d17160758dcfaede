"""KV persistence: full slots of running sequences move from memory to a file; prefixes stay there and come back.

Both are one thing: a sequence has a data file, each full slot is appended to it and that part of the file is mapped
over the slot's memory. Addresses, page tables and kernels see nothing of it; anonymous memory falls, and the system
drops and reads back the file's pages as it sees fit. When the prompt is done and when the request ends, an index is
written beside the data (persist_folder.py), with which a later request, or another process, maps the blocks again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory import map_anonymous, map_file
from .cache import KVCache
from .persist_folder import LEAST, Folder, Stored
from .persist_format import Refused, index_bytes
from .persist_restore import restore
from .persist_writer import SlotBytes, Writer, index_of

COUNTS = (
    "prefixes_stored", "prefixes_restored", "tokens_restored", "no_room_to_restore", "bytes_written", "bytes_spilled",
    "bytes_restored", "quota_reached",
)  # fmt: skip


@dataclass
class _Sequence:
    """What a running sequence has on the disk. stored: tokens of it that an index names; looked: when it was searched
    for full slots; kept: no more of it is written, for want of quota."""

    writer: Writer | None = None
    source: Stored | None = None
    stored: int = 0
    looked: int = 0
    kept: bool = False


class Persistence:
    """Called by the thread that steps, between steps, with consistent tables; a thread of its own syncs files.

    Errors of the disk never end a request: they stop persistence, with one warning and the reason in `describe()`.
    """

    def __init__(self, folder: Folder, kv: KVCache, tell: Callable[[str, Any], None]) -> None:
        self.folder, self.kv = folder, kv
        self.stopped = ""
        self.counts = dict.fromkeys(COUNTS, 0)
        self.write_s = self.restore_s = self.sync_s = 0.0
        self._tell = tell
        self._memory = SlotBytes(kv.pool, kv.slots.slots, kv.slots.size)
        self._mapped: set[int] = set()
        self._most_mapped = map_limit() // 5  # a slot alone among others splits two mappings into up to five more
        self._every = max(1, kv.slots.size // 4)  # tokens between two searches for full slots
        self._running: dict[int, _Sequence] = {}
        self._process = os.getpid()  # in a forked child files are the parent's business
        self._syncing = ThreadPoolExecutor(1, "colibri-persist")
        self._failed: tuple[Stored, OSError] | None = None
        kv.on_release = self._release

    def begin(self, seat: int, ids: Sequence[int]) -> int:
        """A prompt got its seat: put the longest stored beginning of it there, all but its last token at most.

        Returns the number of tokens that need no computing.
        """
        begin, sequence = clock(), _Sequence()
        self._running[seat] = sequence
        try:
            self._settle()
            self.folder.refresh()
            prompt, restored = np.array(ids[:-1], np.int32), -1
            while restored < 0:  # one that is damaged is refused, and the next best is tried
                stored, n = self.folder.find(prompt)
                restored = 0 if stored is None else self._restore(seat, sequence, stored, prompt[:n])
        except OSError as error:
            self.kv.rewind(seat, 0)
            self._stop(error)
            restored = 0
        sequence.stored = sequence.looked = restored
        self.restore_s += clock() - begin
        return restored

    def grown(self, seat: int, ids: Sequence[int], done: int, prompt: int) -> None:
        """A step has ended and `done` tokens of a sequence are in the cache."""
        sequence = self._running.get(seat)
        if sequence is None or (done - sequence.looked < self._every and done != prompt):
            return
        sequence.looked = done
        self._write(lambda: self._spill(seat, sequence), sequence)
        if done == prompt:
            self._write(lambda: self._publish(seat, sequence, ids, done), sequence)

    def end(self, seat: int, ids: Sequence[int], done: int, whole: bool) -> None:
        """A sequence ends; its slots are given back right after. whole: its tables hold `done` tokens and no more."""
        sequence = self._running.pop(seat, None)
        if sequence is None:
            return
        if whole:
            self._write(lambda: self._publish(seat, sequence, ids, done), sequence)
        if sequence.source is not None:
            sequence.source.users -= 1
        if sequence.writer is not None:
            self._drop(sequence.writer)

    def settle(self) -> None:
        """Wait until all that was stored so far is on the disk."""
        if self._process == os.getpid():
            self._syncing.submit(int).result()

    def close(self) -> None:
        """Wait until everything is on the disk; idempotent."""
        if self._process == os.getpid():
            self._syncing.shutdown()

    def counters(self) -> dict[str, int | float]:
        refusals = {f"refused_{kind}": self.folder.refusals[kind] for kind in ("foreign", "layout", "damaged")}
        seconds = {"write_s": self.write_s, "restore_s": self.restore_s, "sync_s": self.sync_s}
        now = {
            "slots_spilled": len(self._mapped),
            "prefixes": len(self.folder.stored),
            "stopped": int(self.stopped != ""),
        }
        return {**self.counts, **refusals, "prefixes_evicted": self.folder.evicted, **now, **seconds}

    def describe(self) -> dict[str, Any]:
        """Facts as JSON values; refused: file name -> why, of at most 20."""
        refused = {file: f"{why.kind}: {why}" for file, why in list(self.folder.refused.items())[:20]}
        path = str(self.folder.path).encode(errors="replace").decode()
        return {"path": path, "quota_bytes": self.folder.quota, "state": "stopped" if self.stopped else "on",
                "reason": self.stopped or None, "prefixes": len(self.folder.stored), "refused": refused}  # fmt: skip

    def _restore(self, seat: int, sequence: _Sequence, stored: Stored, prompt: NDArray[np.int32]) -> int:
        """Tokens restored; -1 when the prefix was refused."""
        try:
            index, fd = self.folder.load(stored)
            try:
                found = restore(self.kv, seat, self._memory, index, fd, prompt, self._mapped, self._most_mapped)
            finally:
                os.close(fd)
        except Refused as error:
            self.kv.rewind(seat, 0)
            self.folder.refuse(stored.name, error)
            self._tell("kv_persistence", self.describe())
            return -1
        if found is None:
            self.counts["no_room_to_restore"] += 1
            return 0
        n, sequence.source = len(prompt), stored
        stored.users += 1
        size = index_bytes(len(index.tokens), len(index.where), len(index.blocks))
        if n == len(index.tokens) and self._writing() and (fd := self.folder.claim(stored, size)) >= 0:
            sequence.writer = Writer(stored.name, fd, found.saved, int(index.blocks["place"].max()) + 1, published=True)
        for name, value in (("prefixes_restored", 1), ("tokens_restored", n), ("bytes_restored", found.bytes)):
            self.counts[name] += value
        return n

    def _spill(self, seat: int, sequence: _Sequence) -> None:
        """Full slots to the file, and the file over their memory."""
        valid, size = self.kv.slots.valid, self.kv.slots.size
        slots = [s for t in self.kv.table(seat) for owned in t.values() for s in owned]
        full = [(s, size) for s in slots if s not in self._mapped and valid[s].bit_length() == size]
        full = full[: self._most_mapped - len(self._mapped)]
        if not full or (writer := self._room(sequence, len(full) * 2 * self._memory.slot)) is None:
            return
        self.counts["bytes_written"] += writer.save(writer.missing(full), self._memory)
        for slot, _ in full:
            at = 2 * writer.saved[slot].place * self._memory.slot
            self._mapped.add(slot)  # first: half mapped is mapped too
            map_file(self._memory.keys[slot], writer.fd, at)
            map_file(self._memory.values[slot], writer.fd, at + self._memory.slot)
            self.counts["bytes_spilled"] += 2 * self._memory.slot

    def _publish(self, seat: int, sequence: _Sequence, ids: Sequence[int], done: int) -> None:
        """Make the sequence a stored prefix, unless there is one that begins with it or it has hardly grown."""
        tokens = np.array(ids[:done], np.int32)
        if done - sequence.stored < LEAST or self.folder.find(tokens)[1] == done:
            return
        tables, valid = self.kv.table(seat), self.kv.slots.valid
        slots = [(s, valid[s].bit_length()) for t in tables for owned in t.values() for s in owned if valid[s]]
        size = index_bytes(done, len(tables), len(slots))
        missing = slots if sequence.writer is None else sequence.writer.missing(slots)
        writer = self._room(sequence, size + 2 * self._memory.token * sum(fill for _, fill in missing))
        if writer is None:
            return
        self.counts["bytes_written"] += writer.save(missing, self._memory) + size
        where, first = self.kv.pool.where[seat, :, :done], self.kv.pool.first[seat, :, :done]
        index = index_of(tokens, where, first, tables, writer.saved, self.kv.slots.size)
        stored = self.folder.keep(writer.name, index)
        sequence.stored, writer.published = done, True
        assert stored.packed is not None
        self._syncing.submit(self._sync, stored, stored.packed, os.dup(writer.fd))

    def _room(self, sequence: _Sequence, need: int) -> Writer | None:
        """The sequence's file with quota for `need` bytes more; None when there is no more to be had."""
        if not self.folder.make_room(need):
            self.counts["quota_reached"] += 1
            sequence.kept = True
            return None
        if sequence.writer is None:
            sequence.writer = Writer(*self.folder.create())
        return sequence.writer

    def _sync(self, stored: Stored, packed: bytes, fd: int) -> None:
        begin = clock()
        try:
            self.folder.publish(stored.name, packed, fd)
            self.counts["prefixes_stored"] += 1
            if stored.packed is packed:
                stored.packed = None
        except OSError as error:
            self._failed = stored, error
        finally:
            os.close(fd)
            self.sync_s += clock() - begin

    def _writing(self) -> bool:
        return not self.stopped and self._process == os.getpid()

    def _write(self, work: Callable[[], None], sequence: _Sequence) -> None:
        if not self._writing() or sequence.kept:
            return
        begin = clock()
        try:
            self._settle()
            if self._writing():
                work()
        except OSError as error:
            self._stop(error)
        self.write_s += clock() - begin

    def _settle(self) -> None:
        """Take notice of what the syncing thread could not do."""
        if self._failed is not None:
            (stored, error), self._failed = self._failed, None
            self.folder.remove(stored.name)
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        if not self.stopped:
            self.stopped = f"{self.folder.path}: {error.strerror or error}"
            self._tell("kv_persistence", self.describe())
            warnings.warn(f"kv_cache_persistence_path: {self.stopped}; nothing more is stored there until the model is "
                          f"loaded again, generation goes on", RuntimeWarning, stacklevel=2)  # fmt: skip

    def _drop(self, writer: Writer) -> None:
        if not writer.published and self._process == os.getpid():
            self.folder.remove(writer.name)
        writer.close()

    def _release(self, slot: int) -> None:
        """A slot is given back: its memory is its own again. Where that fails it stays a private copy, as good."""
        for sequence in self._running.values():
            if sequence.writer is not None:
                sequence.writer.saved.pop(slot, None)
        if slot in self._mapped:
            self._mapped.discard(slot)
            with suppress(OSError):
                map_anonymous(self._memory.keys[slot])
                map_anonymous(self._memory.values[slot])


def map_limit(path: Path = Path("/proc/sys/vm/max_map_count")) -> int:
    """Mappings that the system grants a process."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 65530
