"""A bound model as an emulated process sees it: all arrays and structs in one piece of shared memory, copied there and
back around each call, with the structs' pointers as addresses in that memory."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from colibri_lab.ops import abi, checks
from colibri_lab.ops.cpu import CpuBackend, open_library
from colibri_lab.ops.routing import Routing, sigmoid_table
from colibri_lab.ops.runs import Runs
from colibri_lab.ops.types import ABSENT, COMING, Binding, ExpertPages, KVPool, ModelWeights, Rows

from .machine import ATTN_ROUTER, BIND, EMBED, EXPERT_FFN, FIRST_STAGE, HEAD, RUN, SECOND_STAGE, SETTLE, SIZEOF, Machine

BASE = 0x100000000000  # the address of the memory's first byte in the process; driver.c has the same
Array = np.ndarray[Any, Any]


class ArmBackend(CpuBackend):
    """The CPU backend with kernels on an emulated core: checks, errors and structs are those of `CpuBackend`.

    late: pages that are new since the last call come one at a time while kernels run.
    """

    def __init__(self, machine: Machine, precision: str = "fast", threads: int = 1, late: bool = False) -> None:
        self.precision, self.threads, self.isa = checks.precision(precision), threads, machine.isa
        self.machine, self._late, self._context, self._bound = machine, late, None, None
        self._memory: Memory | None = None
        for i, twin in enumerate(abi.STRUCTS):
            assert machine.call(SIZEOF, i) == c.sizeof(twin), f"{twin.__name__} has another size on this processor"
        self._embed = lambda _, *numbers: self._call(EMBED, *numbers)
        self._attn_router = lambda _, *numbers: self._call(ATTN_ROUTER, *numbers)
        self._first_stage = lambda _, *numbers: self._call(FIRST_STAGE, *numbers)
        self._second_stage = lambda _, *numbers: self._call(SECOND_STAGE, *numbers)
        self._expert_ffn = lambda _, *numbers: self._call(EXPERT_FFN, *numbers)
        self._head = lambda _, *numbers: self._call(HEAD, *numbers)
        self._run_layers = lambda _, *numbers: self._call(RUN, *numbers)
        self._settle_layers = lambda _, *numbers: self._call(SETTLE, *numbers)

    def bind(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        checks.bind(weights, kv, pages, rows)
        self.runs = Runs.allocate(len(weights.layers), weights.top_k)
        model = abi.model(weights, kv, pages, rows, self.runs, self.precision == "exact", self.threads)
        model.reader = None  # this process looks what has come, see Memory.arrive
        routing = next(kept for kept in model.keep if isinstance(kept, Routing))
        fixed = list(arrays((weights, model.keep, sigmoid_table())))
        both = list(arrays((kv, pages.waited, rows, self.runs, routing)))
        self._memory = Memory(self.machine, fixed, both, pages, model, self._late)
        self._bound, self.machine.bound = Binding(weights, kv, pages, rows, [model.keep]), self

    def _call(self, *numbers: int) -> int:
        assert self._memory is not None and self.machine.bound is self, "not bound, or another backend is now"
        self._memory.copy_in()
        failed = self.machine.call(*numbers, meanwhile=self._memory.arrive)
        self._memory.copy_out()
        return failed

    def close(self) -> None:
        self._memory = self._bound = None


class Memory:
    """fixed: arrays that are copied once. both: copied before and after each call. Pages go in as they arrive."""

    def __init__(self, machine: Machine, fixed: list[Array], both: list[Array], pages: ExpertPages, model: Any,
                 late: bool) -> None:  # fmt: skip
        self._places: dict[int, int] = {}  # address here -> offset in the memory
        size = 0
        structs = [model, model.keep[0]]  # the layers are an array of structs
        lengths: dict[int, int] = {c.addressof(struct): c.sizeof(struct) for struct in structs}
        for array in (*fixed, *both, pages.frames, pages.table):
            lengths[array.ctypes.data] = max(array.nbytes, lengths.get(array.ctypes.data, 0))
        for address, length in lengths.items():
            self._places[address] = size
            size += -(-length // 64) * 64
        self._bytes = machine.memory(size)
        self._both, self._pages, self._table = both, pages, np.full_like(pages.table, ABSENT)
        self._late, self._poll = late, open_library()[1].colibri_reader_poll
        for array in fixed:
            self._at(array)[:] = array.reshape(-1).view(np.uint8)
        for struct in structs:
            moved = type(struct).from_buffer_copy(struct)
            self._point(moved)
            at = self._places[c.addressof(struct)]
            self._bytes[at : at + c.sizeof(moved)] = np.frombuffer(moved, np.uint8)
        self.copy_in()
        if machine.call(BIND, size, self._places[c.addressof(model)]):
            raise MemoryError("the emulated process could not bind")

    def copy_in(self) -> None:
        for array in self._both:
            self._at(array)[:] = array.reshape(-1).view(np.uint8)
        self.arrive(0)

    def arrive(self, most: int = 1) -> None:
        """Frames that the table names anew, and then the table: a kernel that waits for a page finds it complete.

        most: pages of a late memory; the others of these are still coming.
        """
        if self._pages.reader:
            self._poll(self._pages.reader)
        table, frames = self._pages.table.copy(), self._pages.frames
        new = np.argwhere((table != self._table) & (table >= 0))
        for entry in map(tuple, new[: most if self._late else len(new)]):
            self._at(frames).reshape(frames.shape)[table[entry]] = frames[table[entry]]
        if self._late:
            table[tuple(new[most:].T)] = COMING
        self._at(self._pages.table)[:] = table.reshape(-1).view(np.uint8)
        self._table = table

    def copy_out(self) -> None:
        for array in self._both:
            array.reshape(-1).view(np.uint8)[:] = self._at(array)

    def _at(self, array: Array) -> Array:
        at = self._places[array.ctypes.data]
        return self._bytes[at : at + array.nbytes]

    def _point(self, struct: Any) -> None:
        """Addresses here become addresses there, in all structs within."""
        if isinstance(struct, c.Array):
            for one in struct:
                self._point(one)
            return
        for name, kind in struct._fields_:
            value = getattr(struct, name)
            if isinstance(value, c.Structure):
                self._point(value)
            elif kind is c.c_void_p and value is not None:
                setattr(struct, name, BASE + self._places[value])


def arrays(thing: Any) -> Iterator[Array]:
    """All arrays within dataclasses, lists and tuples."""
    if isinstance(thing, np.ndarray):
        yield thing
    elif is_dataclass(thing):
        yield from arrays([getattr(thing, one.name) for one in fields(thing)])
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from arrays(one)
