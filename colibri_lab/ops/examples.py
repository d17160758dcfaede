"""Small launches of single kernels, each with what the reference says that it must give: to look at and to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .device import Device
from .int8 import matmul_int8, quantise_row
from .launch import FILE_OF, Kernels, signatures
from .layout import PAGE, MatrixLayout, ceil_div
from .pack import pack_codes
from .products import job_list, shared_bytes, upload
from .reference import rms_norm

Array = NDArray[Any]
SWIGLU = 256  # threads of a block


@dataclass(frozen=True)
class Example:
    """arguments: host arrays and numbers, as the kernel takes them; an array that it gives is None there and in `want`
    by its parameter's name. limit: how far a result may be off, of the largest wanted value; 0: not by a bit."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    arguments: tuple[Array | int | float | None, ...]
    want: dict[str, Array]
    limit: float = 0.0
    shared: int = 0

    def __post_init__(self) -> None:
        names = [name for name, _, _ in self.parameters]
        given = [n for n, a in zip(names, self.arguments, strict=True) if a is None]
        if given != list(self.want):
            raise ValueError(f"{self.kernel}: {', '.join(self.want)} are wanted, {', '.join(given)} are left open")

    @property
    def file(self) -> str:
        return FILE_OF[self.kernel]

    @property
    def parameters(self) -> tuple[tuple[str, np.dtype[Any], bool], ...]:
        return signatures(self.file)[self.kernel].parameters

    def prepared(self, device: Device) -> list[Any]:
        """The arguments on a device; results as empty arrays there."""
        made: list[Any] = []
        for (name, dtype, _), value in zip(self.parameters, self.arguments, strict=True):
            if value is None:
                made.append(device.empty(self.want[name].shape, dtype))
            else:
                made.append(upload(device, value) if isinstance(value, np.ndarray) else value)
        return made

    def launch(self, kernels: Kernels, arguments: list[Any]) -> None:
        kernels(self.kernel, self.grid, self.threads, *arguments, shared=self.shared)

    def run(self, device: Device) -> dict[str, Array]:
        """The results of one launch, by name."""
        arguments = self.prepared(device)
        self.launch(Kernels(device), arguments)
        names = [name for name, _, _ in self.parameters]
        return {name: device.read(arguments[names.index(name)]) for name in self.want}

    def differences(self, got: dict[str, Array]) -> list[str]:
        """One line for each result that is not what is wanted: where first, what was there, and in how many places."""
        said = []
        for name, want in self.want.items():
            have = got[name]
            near = self.limit * float(np.abs(want.astype(np.float64)).max()) if self.limit else 0.0
            wrong = ~(np.abs(have.astype(np.float64) - want) <= near)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                place = ", ".join(map(str, at))
                said.append(f"{name}[{place}] is {have[at]:.6g}, {want[at]:.6g} is right "
                            f"({int(wrong.sum())} of {want.size} differ)")  # fmt: skip
        return said


def norm(rows: int = 2, cols: int = 100, threads: int = 64) -> Example:
    """rms_norm: a block a row, its threads stride through the columns."""
    rng = np.random.default_rng(1)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, cols), (cols,)))
    order = np.arange(rows, dtype=np.int32)[::-1].copy()
    want = rms_norm(x[order], weight, 1e-5)
    return Example("rms_norm", (rows, 1, 1), threads, (x, order, weight, None, cols, 1e-5), {"out": want}, 1e-5,
                   4 * threads // 32)  # fmt: skip


def codes(rows: int = 2, cols: int = 100, group: int = 32) -> Example:
    """quantise_rows: a warp a group of columns."""
    x = np.random.default_rng(2).standard_normal((rows, cols)).astype(np.float32)
    q, steps = (np.stack(part) for part in zip(*(quantise_row(row, group) for row in x), strict=True))
    groups, of = q.shape[1], q.astype(np.int8).reshape(rows, -1)
    want = {"codes": of, "steps": steps, "offsets": (-8 * q.sum(axis=2)).astype(np.int32)}
    return Example("quantise_rows", (ceil_div(groups, 4), rows, 1), 128, (x, None, None, None, cols, groups, group, -8),
                   want)  # fmt: skip


def activation(picks: int = 2, width: int = 300) -> Example:
    """swiglu: a thread an element, no two meet."""
    gate, up = np.random.default_rng(3).standard_normal((2, picks, width)).astype(np.float32)
    grid, want = (ceil_div(width, SWIGLU), picks, 1), gate / (1 + np.exp(-gate)) * up
    return Example("swiglu", grid, SWIGLU, (gate, up, None, width), {"hidden": want}, 1e-6)


def likeliest(rows: int = 2, vocab: int = 500, threads: int = 64) -> Example:
    """finish_logits: a block a row; the largest logit (lower index on ties) and the log of the sum of exponentials."""
    logits = np.random.default_rng(4).standard_normal((rows, vocab)).astype(np.float32)
    logits[:, vocab // 3] = logits[:, vocab // 2] = 5
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1)).astype(np.float32)
    want = {"argmax": logits.argmax(axis=1).astype(np.int32), "largest": logits.max(axis=1), "logsumexp": sums}
    given = (logits, None, None, None, vocab)
    return Example("finish_logits", (rows, 1, 1), threads, given, want, 1e-6, 4 * threads // 32)


def product(rows: int = 48, cols: int = 320, group: int = 32) -> Example:
    """matmul_fast<Int4, 1>: int4 codes out of the file's tiles, int8 activations, a block sixteen rows of weights."""
    rng = np.random.default_rng(5)
    layout = MatrixLayout(rows, cols, "int4", group)
    groups, run = ceil_div(cols, group), np.zeros(layout.pages * PAGE, np.uint8)
    scales = (1 + rng.random((rows, groups))).astype(np.float16) / np.float16(64)
    pack_codes(rng.integers(0, 16, (rows, cols)).astype(np.uint8), scales, layout, run)
    x = rng.standard_normal(cols).astype(np.float32)
    q, steps = quantise_row(x, group)
    table, none = np.arange(layout.pages, dtype=np.int32), np.zeros(1, np.int32)
    offsets = (-8 * q.sum(axis=1)).astype(np.int32)
    place = (*divmod(layout.start, PAGE), layout.tile_bytes, layout.tiles_per_row_group, layout.tiles_per_page)
    arguments = (run, table, job_list([0], [1], 1), none, q.astype(np.int8).reshape(-1), steps, offsets, None, rows,
                 groups, group, layout.pages, *place, layout.groups_per_tile)  # fmt: skip
    want = {"y": matmul_int8(run, layout, x)[None]}
    return Example("matmul_fast<Int4, 1>", (layout.row_groups, 1, 1), 128, arguments, want, 1e-5, shared_bytes(1))


EXAMPLES: dict[str, Callable[[], Example]] = {
    "rms_norm": norm,
    "quantise_rows": codes,
    "swiglu": activation,
    "finish_logits": likeliest,
    "matmul": product,
}
