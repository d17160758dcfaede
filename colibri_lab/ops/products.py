"""Matrices on a device, and rows times a matrix there: the host side of kernels/cuda/matmul.cu.

Shape legend as in types.py; picks are the inputs of a product, one for each (row, expert).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .device import Device
from .launch import BATCHES, FORMATS, Kernels
from .layout import DTYPES, PAGE, ROWS, MatrixLayout, ceil_div
from .types import Matrix, ModelWeights

UNIT = 32  # inputs of an fp16 or fp32 matrix that a lane takes at a time
SHARES = 32  # groups that a block takes at a time, as in matmul.cu


@dataclass(frozen=True)
class Paged:
    """A matrix's layout and where its runs of pages are: frames uint8, tables int32 [runs, pages] of frame numbers."""

    layout: MatrixLayout
    frames: Any
    tables: Any
    pages: int

    @property
    def format(self) -> str:
        return FORMATS[DTYPES.index(self.layout.dtype)]

    @property
    def group(self) -> int:
        """Inputs that a lane of the kernel takes at a time."""
        return self.layout.group if self.layout.quantised else UNIT

    @property
    def groups(self) -> int:
        return ceil_div(self.layout.cols, self.group)

    @property
    def place(self) -> tuple[int, ...]:
        """start_page, start_byte, tile_bytes, across, per_page of a kernel."""
        m = self.layout
        return *divmod(m.start, PAGE), m.tile_bytes, m.tiles_per_row_group, m.tiles_per_page


@dataclass(frozen=True)
class Jobs:
    """Who wants which run: list int32 [J, 4] of (run, first pick, picks up to `batch`, 0); inputs int32 [picks]."""

    list: Any
    inputs: Any
    batch: int


def upload(device: Device, host: np.ndarray[Any, Any]) -> Any:
    """A new array on the device."""
    array = device.empty(host.shape, host.dtype)
    device.write(array, np.ascontiguousarray(host))
    return array


def job_list(runs: list[int], counts: list[int], batch: int) -> np.ndarray[Any, Any]:
    """int32 [J, 4]: each run's picks, one run behind the other, in jobs of at most `batch`."""
    jobs, first = [], 0
    for run, count in zip(runs, counts, strict=True):
        jobs += [(run, first + at, min(batch, count - at), 0) for at in range(0, count, batch)]
        first += count
    return np.array(jobs, np.int32).reshape(-1, 4)


def shared_bytes(batch: int) -> int:
    """Of a block of a product: two rooms for what a turn's groups give to `batch` inputs and the rows of a tile."""
    return 2 * SHARES * batch * ROWS * 4


def batch_for(counts: list[int]) -> int:
    """Inputs a job: one alone reads its weights alone. The choice changes speed, no bit."""
    return BATCHES[0] if max(counts, default=1) == 1 else BATCHES[-1]


class Activations:
    """Inputs of products as floats, and in `fast` as int8 codes with room made once for the widest."""

    def __init__(self, kernels: Kernels, fast: bool, sizes: list[tuple[int, Paged]]) -> None:
        """sizes: (most inputs, matrix) of every kind of product to come."""
        self._kernels, self._fast = kernels, fast
        of = [(n * m.groups * m.group, n * m.groups) for n, m in sizes if self.coded(m)]
        codes, groups = (max((size[i] for size in of), default=0) for i in (0, 1))
        device = kernels.device
        self._codes, self._steps = device.empty((codes,), np.int8), device.empty((groups,), np.float32)
        self._offsets = device.empty((groups,), np.int32)

    def coded(self, m: Paged) -> bool:
        return self._fast and m.layout.quantised

    def prepare(self, x: Any, n: int, m: Paged) -> None:
        """Make the codes of x [n, K] that products with `m` will use, where they use any."""
        if self.coded(m):
            shift = -8 if m.layout.dtype == "int4" else 0
            self._kernels("quantise_rows", (ceil_div(m.groups, 4), n, 1), 128, x, self._codes, self._steps,
                          self._offsets, m.layout.cols, m.groups, m.group, shift)  # fmt: skip

    def product(self, x: Any, m: Paged, jobs: Jobs, y: Any) -> None:
        """y [picks, N] of x [., K], which `prepare` has seen last."""
        grid = (m.layout.row_groups, len(jobs.list), 1)
        shared = shared_bytes(jobs.batch)
        where = (m.frames, m.tables, jobs.list, jobs.inputs)
        tiles = (m.groups, m.group, m.pages, *m.place, m.layout.tile_cols // m.group)
        if self.coded(m):
            self._kernels(f"matmul_fast<{m.format}, {jobs.batch}>", grid, 128, *where, self._codes, self._steps,
                          self._offsets, y, m.layout.rows, *tiles, shared=shared)  # fmt: skip
        else:
            self._kernels(f"matmul_exact<{m.format}, {jobs.batch}>", grid, 128, *where, x, y, m.layout.rows,
                          m.layout.cols, *tiles, shared=shared)  # fmt: skip

    def multiply(self, x: Any, m: Paged, n: int, jobs: Jobs, y: Any) -> None:
        """y [n, N] of x [n, K] times a resident matrix."""
        self.prepare(x, n, m)
        self.product(x, m, jobs, y)


class Vectors:
    """Norms and biases on the device, found by the host's own."""

    def __init__(self, device: Device, w: ModelWeights) -> None:
        parts = [(m.input_norm, m.post_norm, m.attention.qkv_bias, m.attention.o_bias, m.attention.q_norm,
                  m.attention.k_norm) for m in w.layers]  # fmt: skip
        there = [w.final_norm, *(v for part in parts for v in part if v is not None)]
        widest = max(w.hidden, *(m.attention.qkv.layout.rows for m in w.layers))
        self._zeros = upload(device, np.zeros(widest, np.float32))
        self._made = {id(v): upload(device, v) for v in there}

    def __call__(self, host: Any) -> Any:
        """The device's; zeros for none."""
        return self._zeros if host is None else self._made[id(host)]


class Residents:
    """The model's own matrices on the device, each in whole pages; and jobs of one run for up to `capacity` rows."""

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._made: dict[int, Paged] = {}
        self._room = device.empty((max(1, ceil_div(capacity, BATCHES[-1])), 4), np.int32)
        self._jobs: tuple[int, Jobs] | None = None  # of the last number of rows
        self._kept: dict[int, Jobs] = {}
        self.rows = upload(device, np.arange(capacity, dtype=np.int32))

    def matrix(self, m: Matrix) -> Paged:
        """Uploaded once."""
        if id(m) not in self._made:
            pages = m.layout.pages
            frames = np.zeros(pages * PAGE, np.uint8)
            frames[: m.layout.end] = m.data.reshape(-1)[: m.layout.end]
            table = upload(self._device, np.arange(pages, dtype=np.int32))
            self._made[id(m)] = Paged(m.layout, upload(self._device, frames), table, pages)
        return self._made[id(m)]

    def keep(self, n: int) -> None:
        """From now on `jobs` of so many inputs have a place of their own, which a graph may hold."""
        batch = batch_for([n])
        self._kept[n] = Jobs(upload(self._device, job_list([0], [n], batch)), self.rows, batch)

    def jobs(self, n: int) -> Jobs:
        """Inputs 0 to n of a resident matrix."""
        if n in self._kept:
            return self._kept[n]
        if self._jobs is None or self._jobs[0] != n:
            batch = batch_for([n])
            jobs = job_list([0], [n], batch)
            self._device.write(self._room[: len(jobs)], jobs)
            self._jobs = n, Jobs(self._room[: len(jobs)], self.rows, batch)
        return self._jobs[1]
