"""The CPU backend: checks once at bind, then calls into C that carry integers only."""

from __future__ import annotations

import ctypes as c
import os

from . import abi, build, checks, isa
from .runs import Runs
from .types import Binding, ExpertPages, KVPool, MissingPage, ModelWeights, NonFiniteLogits, Rows

NON_FINITE, MISSING_PAGE, BAD_INDEX = 1, 2, 3  # kinds of failure in kernels/cpu/types.h
WHAT = ("token", "seat", "position", "kv_dst", "experts", "out_row", "where", "layer", "n")
MAX_ROWS = 65535  # units of work of one run of the thread pool


class CpuBackend:
    """See types.Backend. threads: None takes the processors this process may use. isa: None takes the best level.

    ConfigError for a level that this processor does not run, KernelError when the kernels cannot be compiled.
    """

    name = "cpu"

    def __init__(self, precision: str = "fast", threads: int | None = None, isa: str | None = None) -> None:
        self.precision = checks.precision(precision)
        self.threads = usable_processors() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.isa, library = open_library(isa)
        self._bind, self._free = library.colibri_bind, library.colibri_free
        self._embed, self._head = library.colibri_embed, library.colibri_head
        self._attn_router, self._expert_ffn = library.colibri_attn_router, library.colibri_expert_ffn
        self._first_stage, self._second_stage = library.colibri_first_stage, library.colibri_second_stage
        self._run_layers, self._settle_layers = library.colibri_run_layers, library.colibri_settle_layers
        self._context: c.c_void_p | None = None
        self._process = 0  # that has the library's threads
        self._bound: Binding | None = None

    def bind(self, weights: ModelWeights, kv: KVPool, pages: ExpertPages, rows: Rows) -> None:
        checks.bind(weights, kv, pages, rows)
        if rows.capacity > MAX_ROWS:
            raise ValueError(f"a step has at most {MAX_ROWS} rows, not {rows.capacity}")
        self.close()
        self.runs = Runs.allocate(len(weights.layers), weights.top_k)
        model = abi.model(weights, kv, pages, rows, self.runs, self.precision == "exact", self.threads)
        context = self._bind(c.byref(model))
        if not context:
            raise MemoryError(f"no memory for the scratch of {rows.capacity} rows")
        self._context, self._process = c.c_void_p(context), os.getpid()
        # the library holds bare addresses: keep their arrays
        self._bound = Binding(weights, kv, pages, rows, [model.keep, self.runs])

    def embed(self, n: int) -> None:
        failed = self._embed(self._context, n)
        if failed:
            self._raise(failed, -1)

    def attn_router(self, layer: int, n: int, at: int = 0) -> None:
        failed = self._attn_router(self._context, layer, at, n)
        if failed:
            self._raise(failed, layer, at)

    def first_stage(self, layer: int, n: int, at: int = 0) -> None:
        failed = self._first_stage(self._context, layer, at, n)
        if failed:
            self._raise(failed, layer, at)

    def second_stage(self, layer: int, n: int, at: int = 0) -> None:
        failed = self._second_stage(self._context, layer, at, n)
        if failed:
            self._raise(failed, layer, at)

    def expert_ffn(self, layer: int, n: int, first: int, last: int, at: int = 0) -> None:
        failed = self._expert_ffn(self._context, layer, at, n, first, last)
        if failed:
            self._raise(failed, layer)

    def run_layers(self, first: int, n: int) -> int:
        failed = self._run_layers(self._context, first, n)
        reached = int(self.runs.reached[0])
        if failed:
            self._raise(failed, reached)
        return reached

    def settle_layers(self, first: int, last: int, n: int) -> None:
        failed = self._settle_layers(self._context, first, last, n)
        if failed:
            self._raise(failed, -1)

    def head(self, n: int) -> None:
        failed = self._head(self._context, n)
        if failed:
            self._raise(failed, -1)

    def close(self) -> None:
        context, self._context, self._bound = self._context, None, None
        if context is not None and self._process == os.getpid():  # a forked child has no threads to wait for
            self._free(context)

    def __del__(self) -> None:
        if getattr(self, "_context", None) is not None:
            self.close()

    def _raise(self, failed: int, layer: int, at: int = 0) -> None:
        kind, what, number = failed & 0xFF, failed >> 8 & 0xFF, failed >> 16
        if kind == NON_FINITE:
            raise NonFiniteLogits(layer, at + number)
        if kind == MISSING_PAGE:
            raise MissingPage(f"layer {layer} expert {number} is not in memory")
        if kind == BAD_INDEX:
            raise IndexError(f"{WHAT[what]} is outside its range (at {number})")
        raise RuntimeError("the backend is not bound")


def open_library(level: str | None = None) -> tuple[str, c.CDLL]:
    """(ISA level, library with typed functions); level None: COLIBRI_ISA or the best."""
    level = isa.choose(level)
    library = build.load(level)
    library.colibri_sizeof.argtypes, library.colibri_sizeof.restype = [c.c_int], c.c_int
    for i, struct in enumerate(abi.STRUCTS):
        if library.colibri_sizeof(i) != c.sizeof(struct):
            raise build.KernelError(f"ops/abi.py and kernels/cpu/types.h disagree about {struct.__name__}")
    library.colibri_bind.argtypes, library.colibri_bind.restype = [c.c_void_p], c.c_void_p
    library.colibri_free.argtypes, library.colibri_free.restype = [c.c_void_p], None
    stages = ("first_stage", 3), ("second_stage", 3), ("run_layers", 2), ("settle_layers", 3)
    for name, integers in (("embed", 1), ("attn_router", 3), *stages, ("expert_ffn", 5), ("head", 1)):
        function = getattr(library, f"colibri_{name}")
        function.argtypes, function.restype = [c.c_void_p] + [c.c_int] * integers, c.c_int64
    library.colibri_route.argtypes = [c.c_void_p, c.c_void_p, c.c_int, c.c_int]
    library.colibri_route.restype = c.c_int64
    library.colibri_probe.argtypes = [c.c_int, c.c_int64, c.c_int, c.c_int, c.c_int]
    library.colibri_probe.restype = c.c_double
    _type_reader(library)
    return level, library


def _type_reader(library: c.CDLL) -> None:
    """kernels/cpu/reader.c; pager/queue.py calls it."""
    library.colibri_crc32.argtypes, library.colibri_crc32.restype = [c.c_void_p, c.c_int64], c.c_uint32
    for name, arguments, result in (
        ("open", [c.c_int, c.c_int], c.c_void_p),
        ("serve", [c.c_void_p, c.c_void_p, c.c_int, c.c_int64, c.c_int64, c.c_int], c.c_void_p),
        ("read", [c.c_void_p, c.c_int, c.c_int64, c.c_void_p, c.c_void_p], None),
        ("tell", [c.c_void_p, c.c_int, c.c_void_p], None),
        ("cancel", [c.c_void_p, c.c_int], c.c_int),
        ("poll", [c.c_void_p], None),
        ("wait", [c.c_void_p, c.c_int, c.c_int64], c.c_int),
        ("error", [c.c_void_p, c.c_int, c.c_void_p], c.c_int),
        ("busy", [c.c_void_p], c.c_int64),
        ("close", [c.c_void_p], None),
    ):
        function = getattr(library, f"colibri_reader_{name}")
        function.argtypes, function.restype = arguments, result


def usable_processors() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
