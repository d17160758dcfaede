"""How a weight matrix lies in pages: the one description shared by converter, kernels and reference.

A matrix W [N, K] (N output rows, K inputs) is cut into tiles of 16 rows x `tile_cols` inputs. Tiles run along K first,
then down the row groups. A tile never straddles a 64 KiB page: one that would is moved to the next page's first byte.

Tile contents, R = 16 rows, T = tile_cols, g = group:
  fp32  float32 [T][R]
  fp16  float16 [T][R]
  int8  float16 scale [T/g][R], then int8 [T/4][R][4]: chunk c, row r, byte j is input 4c+j
  int4  float16 scale [T/g][R], then uint8 [T/8][R][4]: low nibble is input 8c+j, high nibble is input 8c+4+j
A value is scale * q for int8 (q in -127..127) and scale * (q - 8) for int4 (q in 0..15).
Rows past N and inputs past K are padding; no kernel lets them reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PAGE = 64 * 1024
ROWS = 16
DTYPES = ("fp32", "fp16", "int8", "int4")
GROUPS = (32, 64, 128)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class MatrixLayout:
    """Where the tiles of one matrix lie in a run of pages.

    rows, cols: N and K before padding. group: inputs that share a scale (0 for fp32 and fp16).
    start: byte offset of the first tile from the first page of the run.
    """

    rows: int
    cols: int
    dtype: str
    group: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.rows < 1 or self.cols < 1 or self.start < 0:
            raise ValueError(f"a matrix of {self.rows} x {self.cols} at {self.start} cannot be laid out")
        if self.quantised and self.group not in GROUPS:
            raise ValueError(f"group {self.group} is none of {GROUPS}")

    @property
    def quantised(self) -> bool:
        return self.dtype in ("int8", "int4")

    @cached_property
    def tile_cols(self) -> int:
        """The widest of 256, 128, 64, 32 that holds whole groups and pads K the least."""
        least = self.group if self.quantised else 32
        widths = [w for w in (256, 128, 64, 32) if w >= least]
        return min(widths, key=lambda w: (ceil_div(self.cols, w) * w, -w))

    @property
    def groups_per_tile(self) -> int:
        return self.tile_cols // self.group if self.quantised else 0

    @cached_property
    def tile_bytes(self) -> int:
        weights = self.tile_cols * ROWS
        if self.dtype == "fp32":
            return weights * 4
        if self.dtype == "fp16":
            return weights * 2
        scales = self.groups_per_tile * ROWS * 2
        return scales + (weights if self.dtype == "int8" else weights // 2)

    @property
    def row_groups(self) -> int:
        return ceil_div(self.rows, ROWS)

    @property
    def tiles_per_row_group(self) -> int:
        return ceil_div(self.cols, self.tile_cols)

    @property
    def tiles(self) -> int:
        return self.row_groups * self.tiles_per_row_group

    @property
    def tiles_per_page(self) -> int:
        return PAGE // self.tile_bytes

    def tile_offset(self, tile: int) -> int:
        """Byte offset of a tile from the first page of the run."""
        page, at = divmod(self.start, PAGE)
        first = (PAGE - at) // self.tile_bytes  # tiles that still fit in the page where the matrix starts
        if tile < first:
            return self.start + tile * self.tile_bytes
        down, across = divmod(tile - first, self.tiles_per_page)
        return (page + 1 + down) * PAGE + across * self.tile_bytes

    @cached_property
    def end(self) -> int:
        """Byte offset just past the last tile."""
        return self.tile_offset(self.tiles - 1) + self.tile_bytes

    @property
    def pages(self) -> int:
        """Pages of the run up to this matrix's end."""
        return ceil_div(self.end, PAGE)


def expert_layouts(
    hidden: int, ffn: int, dtype: str, group: int = 0
) -> tuple[MatrixLayout, MatrixLayout, MatrixLayout]:
    """gate [F, H], up [F, H], down [H, F] of one expert, adjacent in one run of pages."""
    gate = MatrixLayout(ffn, hidden, dtype, group)
    up = MatrixLayout(ffn, hidden, dtype, group, start=_align(gate.end))
    down = MatrixLayout(hidden, ffn, dtype, group, start=_align(up.end))
    return gate, up, down


def _align(offset: int) -> int:
    return ceil_div(offset, 64) * 64
