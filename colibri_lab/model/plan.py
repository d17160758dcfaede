"""Which tensors a model.colibri holds, with dtype, shape and page layout.

A pure function of the spec and the quantisation.

File order: routed experts first (whole pages each, so all begin at multiples of 64 KiB), then the resident matrices
in pages, then plain float32, checksums and the fp16 embedding. Names are ours, by role, the same for all families:
  layers.3.experts.7       U8 [G, 65536]: gate, up, down adjacent in the tile layout of ops/layout.py
  layers.3.attention.qkv   U8 [pages, 65536]: queries, keys, values one below the other
  layers.3.router          F32 [E, H]; norms, biases and the shared gate are F32 too
  layers.3.checksums       U32 [E, G]: crc32 of each expert page
  checksums                U32 [tensors]: crc32 of each resident tensor, in file order

"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..ops.layout import DTYPES, GROUPS, PAGE, MatrixLayout, expert_layouts
from .errors import ModelError
from .spec import ModelSpec

ITEM = {"U8": 1, "F16": 2, "F32": 4, "U32": 4}
CHECKSUMS = "checksums"


@dataclass(frozen=True)
class Piece:
    """One tensor of the file. layout: of a matrix in pages, None for plain values."""

    name: str
    dtype: str  # U8 | F16 | F32 | U32
    shape: tuple[int, ...]
    layout: MatrixLayout | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM[self.dtype]


@dataclass(frozen=True)
class Plan:
    """The tensors of one model in one quantisation. group: 0 for fp32 and fp16."""

    spec: ModelSpec
    quantize: str
    group: int

    @cached_property
    def expert_layout(self) -> tuple[MatrixLayout, MatrixLayout, MatrixLayout]:
        return expert_layouts(self.spec.hidden_size, self.spec.expert_ffn, self.quantize, self.group)

    @property
    def expert_pages(self) -> int:
        return self.expert_layout[2].pages

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert."""
        return self.expert_pages * PAGE

    @cached_property
    def residents(self) -> tuple[Piece, ...]:
        """The resident tensors in file order, without the checksums."""
        pieces = list(self._residents())
        order = {"U8": 0, "F32": 1, "F16": 2}
        return tuple(sorted(pieces, key=lambda piece: order[piece.dtype]))

    def tensors(self) -> Iterator[Piece]:
        """All tensors in file order."""
        for layer in self.spec.sparse_layers:
            for expert in range(self.spec.experts):
                yield Piece(expert_name(layer, expert), "U8", (self.expert_pages, PAGE))
        wide = [piece for piece in self.residents if piece.dtype != "F16"]
        yield from wide
        for layer in self.spec.sparse_layers:
            yield Piece(checksums_name(layer), "U32", (self.spec.experts, self.expert_pages))
        yield Piece(CHECKSUMS, "U32", (len(self.residents),))
        yield from self.residents[len(wide) :]

    @property
    def tensor_count(self) -> int:
        """How many tensors there are, without building them."""
        return len(self.spec.sparse_layers) * (self.spec.experts + 1) + len(self.residents) + 1

    @property
    def data_bytes(self) -> int:
        experts = len(self.spec.sparse_layers) * self.spec.experts * (self.expert_bytes + 4 * self.expert_pages)
        return experts + sum(piece.nbytes for piece in self.residents) + 4 * len(self.residents)

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of all routed experts: what a budget (`expert_cache_bytes`) may hold a part of."""
        return self.expert_bytes * self.spec.experts * len(self.spec.sparse_layers)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are always in memory: the resident tensors and the rotary tables."""
        tables = self.spec.max_positions * self.spec.head_dim * 4
        return sum(piece.nbytes for piece in self.residents) + tables

    def matrix(self, rows: int, cols: int, dtype: str | None = None) -> MatrixLayout:
        dtype = dtype or self.quantize
        return MatrixLayout(rows, cols, dtype, self.group if dtype in ("int8", "int4") else 0)

    def _residents(self) -> Iterator[Piece]:
        spec, hidden = self.spec, self.spec.hidden_size
        for i in range(spec.layers):
            layer = f"layers.{i}"
            yield self._pages(f"{layer}.attention.qkv", spec.q_rows + 2 * spec.kv_rows, hidden)
            yield self._pages(f"{layer}.attention.o", hidden, spec.q_rows)
            yield _plain(f"{layer}.input_norm", hidden)
            yield _plain(f"{layer}.post_norm", hidden)
            if spec.qkv_bias:
                yield _plain(f"{layer}.attention.qkv_bias", spec.q_rows + 2 * spec.kv_rows)
            if spec.o_bias:
                yield _plain(f"{layer}.attention.o_bias", hidden)
            if spec.qk_norm:
                flat = spec.qk_norm == "flat"
                yield _plain(f"{layer}.attention.q_norm", spec.q_rows if flat else spec.head_dim)
                yield _plain(f"{layer}.attention.k_norm", spec.kv_rows if flat else spec.head_dim)
            if not spec.sparse[i]:
                yield from self._swiglu(f"{layer}.dense", spec.dense_ffn)
                continue
            yield _plain(f"{layer}.router", spec.experts, hidden)
            if spec.shared_ffn:
                yield from self._swiglu(f"{layer}.shared", spec.shared_ffn)
                yield _plain(f"{layer}.shared_gate", hidden)
        yield _plain("final_norm", hidden)
        tied = spec.tied and self.quantize == "int4"  # a tied head is the embedding too: 4 bits would be too few
        yield self._pages("head", spec.vocab_size, hidden, "int8" if tied else None)
        if not spec.tied:
            yield Piece("embedding", "F32" if self.quantize == "fp32" else "F16", (spec.vocab_size, hidden))

    def _swiglu(self, prefix: str, width: int) -> Iterator[Piece]:
        yield self._pages(f"{prefix}.gate", width, self.spec.hidden_size)
        yield self._pages(f"{prefix}.up", width, self.spec.hidden_size)
        yield self._pages(f"{prefix}.down", self.spec.hidden_size, width)

    def _pages(self, name: str, rows: int, cols: int, dtype: str | None = None) -> Piece:
        layout = self.matrix(rows, cols, dtype)
        return Piece(name, "U8", (layout.pages, PAGE), layout)


def make_plan(spec: ModelSpec, quantize: str, group: int, source: str = "quantize") -> Plan:
    """Plan of a spec; ModelError for a quantisation that is not known. group is ignored for fp32 and fp16."""
    if quantize not in DTYPES:
        raise ModelError(f"{source}: {quantize!r:.40} is none of {', '.join(DTYPES)}")
    if quantize in ("fp32", "fp16"):
        return Plan(spec, quantize, 0)
    if group not in GROUPS:
        raise ModelError(f"{source}: group size {group!r:.40} is none of {', '.join(map(str, GROUPS))}")
    return Plan(spec, quantize, group)


def expert_name(layer: int, expert: int) -> str:
    return f"layers.{layer}.experts.{expert}"


def checksums_name(layer: int) -> str:
    return f"layers.{layer}.checksums"


def _plain(name: str, *shape: int) -> Piece:
    return Piece(name, "F32", shape)
