"""Reads in the system's own queue (kernels/cpu/reader.c): no thread waits for the disk, and none has to wake up.

What has come is found by whoever looks: a kernel that waits for a page, or Python. A slot is a run of frames.
"""

from __future__ import annotations

import ctypes as c
import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PagerError
from ..ops.cpu import open_library
from ..ops.types import I32
from .frames import Frames
from .reader import Reader
from .transfer import guesses_at_once, land

QUEUED, LANDED, FAILED = 1, 3, 4  # states of a slot in kernels/cpu/reader.c
SECOND = 1_000_000_000


class QueueFlight:
    """See transfer.Flight."""

    __slots__ = ("_ended", "_transfer", "cancelled", "early", "error", "expert", "layer", "run", "sums")

    def __init__(self, transfer: QueueTransfer, layer: int, expert: int, run: int) -> None:
        self.layer, self.expert, self.run, self._transfer = layer, expert, run, transfer
        self.cancelled = self.early = self._ended = False
        self.error: BaseException | None = None
        self.sums: NDArray[np.uint32] | None = None  # of its pages, if they are to be checked; the library reads them

    @property
    def landed(self) -> bool:
        return self._ended or self._end(self._transfer.look(self.run))

    def cancel(self) -> bool:
        self.cancelled = self.cancelled or (not self._ended and self._transfer.cancel(self.run))
        return self.cancelled

    def wait(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while not self._ended:
            try:
                self._end(self._transfer.wait(self.run))
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt:
            raise interrupt

    def publish(self) -> None:
        if self.error is None:
            self._transfer.tell(self.layer, self.expert, self.run)

    def _end(self, state: int) -> bool:
        """Whether this is the state of a read that has ended; of a failed one `error` is set."""
        if state < LANDED:
            return False
        if state == FAILED:
            self.error = self._transfer.error(self.layer, self.expert, self.run)
        elif self.sums is not None:
            self._transfer.checked(self.layer, self.expert)
        self._ended = True
        return True

    def fail(self, error: Exception) -> QueueFlight:
        """It could not even begin."""
        self.error, self._ended = error, True
        return self


class QueueTransfer:
    """See transfer.Transfer."""

    way, direct = "queue", True

    def __init__(self, reader: Reader, library: c.CDLL, address: int) -> None:
        """Use `open`."""
        self._file, self._reader, self._library = reader.file, reader, library
        self.address: int | None = address
        self._handle = c.c_void_p(address)
        self._states: Any = []  # of the slots, as the library sees them
        self._offsets: dict[tuple[int, int], int] = {}
        self._checked: set[tuple[int, int]] = set()
        self._read, self._poll = library.colibri_reader_read, library.colibri_reader_poll

    @classmethod
    def open(cls, reader: Reader, depth: int) -> QueueTransfer | None:
        """None where the system has no such queue, or none left. KernelError: no compiler. The reader's file is open
        with O_DIRECT, and closed by `close`."""
        _, library = open_library()
        address = library.colibri_reader_open(reader.fileno(), depth)
        return cls(reader, library, address) if address else None

    def serve(self, frames: Frames, table: I32) -> None:
        self._keep = frames, table  # the library has their addresses
        self._bytes, self._experts = frames.run_bytes, int(table.shape[1])
        self._table, self._entry = int(table.ctypes.data), 4 * int(table.shape[2])
        states = self._library.colibri_reader_serve(
            self._handle, frames.array.ctypes.data, frames.most, frames.run_bytes, self._reader.piece or self._bytes,
            guesses_at_once(frames.run_bytes),
        )  # fmt: skip
        if not states:
            raise MemoryError(f"no memory for the reads of {frames.most} experts")
        self._states = (c.c_int32 * frames.most).from_address(states)

    def read(self, layer: int, expert: int, run: int) -> QueueFlight:
        return self._begin(layer, expert, run, self._entries(layer, expert))

    def guess(self, layer: int, expert: int, run: int) -> QueueFlight:
        return self._begin(layer, expert, run, None)

    def load(self, flights: Sequence[QueueFlight]) -> None:
        land(flights)
        for flight in flights:
            if flight.error is not None:
                raise flight.error

    def send(self, flights: Sequence[QueueFlight]) -> None:
        """They have begun."""

    def look(self, run: int) -> int:
        """The state of a run's read now."""
        if self._states[run] < LANDED:
            self._poll(self._handle)
        return int(self._states[run])

    def wait(self, run: int) -> int:
        """The same, when it has ended or after a second."""
        if self._states[run] < LANDED:
            self._library.colibri_reader_wait(self._handle, run, SECOND)
        return int(self._states[run])

    def cancel(self, run: int) -> bool:
        """Whether it was called off before it began."""
        return self._states[run] == QUEUED and bool(self._library.colibri_reader_cancel(self._handle, run))

    def tell(self, layer: int, expert: int, run: int) -> None:
        """The page table is told of a guess."""
        if self.address is not None:
            self._library.colibri_reader_tell(self._handle, run, self._entries(layer, expert))

    def checked(self, layer: int, expert: int) -> None:
        """Its pages need not be checked again."""
        self._checked.add((layer, expert))

    def error(self, layer: int, expert: int, run: int) -> PagerError:
        """What a failed read met."""
        if self.address is None:
            return self._reader.error(layer, expert, errno.EBADF, 0)
        place = c.c_int()
        reason = self._library.colibri_reader_error(self._handle, run, c.byref(place))
        return self._reader.error(layer, expert, reason, place.value)

    def reading_ns(self) -> int:
        return int(self._library.colibri_reader_busy(self._handle)) if self.address is not None else 0

    def close(self) -> None:
        if self.address is not None:
            self.address = None
            self._states = [FAILED] * len(self._states)  # of whatever was under way
            self._library.colibri_reader_close(self._handle)
            self._reader.close()

    __del__ = close

    def _begin(self, layer: int, expert: int, run: int, entries: int | None) -> QueueFlight:
        flight = QueueFlight(self, layer, expert, run)
        if self.address is None:
            return flight.fail(self.error(layer, expert, run))
        try:
            offset = self._offset(layer, expert)
            if (layer, expert) not in self._checked:
                flight.sums = np.ascontiguousarray(self._file.checksums(layer, expert), np.uint32)
        except Exception as error:  # told to whoever needs the expert, as if the disk had failed
            return flight.fail(error)
        sums = None if flight.sums is None else flight.sums.ctypes.data
        self._read(self._handle, run, offset, sums, entries)
        return flight

    def _offset(self, layer: int, expert: int) -> int:
        offset = self._offsets.get((layer, expert))
        if offset is None:
            offset, size = self._file.extent(layer, expert)
            if size != self._bytes:
                where = f"{self._file.path}: layer {layer} expert {expert}"
                raise PagerError(f"{where}: {size} bytes, where experts have {self._bytes}; convert the model again")
            self._offsets[layer, expert] = offset
        return offset

    def _entries(self, layer: int, expert: int) -> int:
        return self._table + self._entry * (layer * self._experts + expert)
