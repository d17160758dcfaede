"""What an index file says of a stored prefix: tokens, where each one's keys and values lie, checksums.

Described for people in docs/format.md. Nothing is believed before it is checked: the length that the header implies
against the file's, checksums, then every index, so that any bytes give a Refused or tables that are safe to use.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAGIC, VERSION = b"colibrKV", 1
# magic, version, identity, layers, slot size, bytes of a token's keys, dtype, tokens, blocks, crc of the rest, own crc
HEAD = struct.Struct("<8sI32s8I")
BLOCK = np.dtype([("layer", "<i4"), ("owner", "<i4"), ("fill", "<i4"), ("place", "<i4"), ("k", "<u4"), ("v", "<u4")])
DTYPES = ("fp16", "fp32")
I2, I4 = np.dtype("<i2"), np.dtype("<i4")


class Refused(ValueError):
    """A stored prefix cannot be used. kind: foreign (another model or settings), layout (another slot size or dtype),
    damaged, gone; the message says what is wrong."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Layout:
    """What a prefix must agree with to be used. identity: 32 bytes that name all that decides keys and values."""

    identity: bytes
    layers: int
    slot_size: int  # tokens
    token_bytes: int  # of a token's keys in one layer; its values have as many
    dtype: str
    positions: int  # tokens of the longest sequence
    experts: int

    @property
    def slot_bytes(self) -> int:
        """Of a slot's keys; a block of the data file is twice that."""
        return self.slot_size * self.token_bytes


@dataclass(frozen=True)
class Index:
    """A stored prefix. Block b of `blocks` is a slot's worth: the first `fill` tokens hold data, its keys begin at byte
    2 * place * slot_bytes of the data file and its values slot_bytes later; k and v are crc32 of the filled part.

    where[l, p] = b * slot_size + i: position p of layer l is token i of block b. Blocks of an owner follow each other
    in the order in which they were filled.
    """

    tokens: NDArray[np.int32]  # [T]
    where: NDArray[np.int32]  # [L, T]
    first: NDArray[np.int16]  # [L, T] as in KVPool
    blocks: NDArray[np.void]  # [B] of BLOCK

    def pack(self, layout: Layout) -> bytes:
        """The bytes of an index file."""
        body = b"".join(np.ascontiguousarray(part, kind).tobytes() for part, kind in
                        ((self.where, I4), (self.first, I2), (self.blocks, BLOCK)))  # fmt: skip
        tokens = np.ascontiguousarray(self.tokens, I4).tobytes()
        facts = (layout.layers, layout.slot_size, layout.token_bytes, DTYPES.index(layout.dtype))
        sizes = (len(self.tokens), len(self.blocks), zlib.crc32(body))
        head = HEAD.pack(MAGIC, VERSION, layout.identity, *facts, *sizes, 0)
        return head[:-4] + struct.pack("<I", zlib.crc32(tokens, zlib.crc32(head[:-4]))) + tokens + body


def index_bytes(tokens: int, layers: int, blocks: int) -> int:
    """Length of an index file."""
    return HEAD.size + 4 * tokens + (4 + 2) * tokens * layers + BLOCK.itemsize * blocks


@dataclass(frozen=True)
class Head:
    """The first part of an index file, checked."""

    tokens: NDArray[np.int32]  # [T]
    blocks: int
    checksum: int  # of what follows the tokens


def head_bytes(start: bytes, size: int, layout: Layout) -> int:
    """Bytes up to the end of the tokens, of an index file of `size` bytes that begins with `start`. Refused."""
    _, _, tokens, blocks, _ = _facts(start, layout)
    most = tokens * layout.layers
    if not 0 < tokens <= layout.positions or not 0 < blocks <= most:
        raise Refused("damaged", f"{tokens} tokens in {blocks} blocks are none that this model can have")
    if size != index_bytes(tokens, layout.layers, blocks):
        raise Refused("damaged", f"{tokens} tokens in {blocks} blocks do not make its {size} bytes")
    return HEAD.size + 4 * tokens


def read_head(start: bytes, layout: Layout) -> Head:
    """From the first `head_bytes` of a file. Refused."""
    own, checked, tokens, blocks, checksum = _facts(start, layout)
    ids = start[HEAD.size : HEAD.size + 4 * tokens]
    if zlib.crc32(ids, zlib.crc32(checked)) != own or len(ids) != 4 * tokens:
        raise Refused("damaged", "the header does not match its checksum")
    return Head(np.frombuffer(ids, I4).astype(np.int32), blocks, checksum)


def read_index(data: bytes, layout: Layout, data_bytes: int) -> Index:
    """From all bytes of an index file whose data file has `data_bytes`. Refused."""
    at = head_bytes(data[: HEAD.size], len(data), layout)
    head = read_head(data[:at], layout)
    if zlib.crc32(data[at:]) != head.checksum:
        raise Refused("damaged", "the page tables do not match their checksum")
    shape, count = (layout.layers, len(head.tokens)), layout.layers * len(head.tokens)
    where = np.frombuffer(data, I4, count, at).astype(np.int32).reshape(shape)
    first = np.frombuffer(data, I2, count, at + 4 * count).astype(np.int16).reshape(shape)
    index = Index(head.tokens, where, first, np.frombuffer(data, BLOCK, head.blocks, at + 6 * count))
    _check(index, layout, data_bytes)
    return index


def _facts(start: bytes, layout: Layout) -> tuple[int, bytes, int, int, int]:
    """(own checksum, what it is of, tokens, blocks, checksum of the rest) of a header that fits the layout."""
    if len(start) < HEAD.size or start[:8] != MAGIC:
        raise Refused("damaged", "is no index of a stored prefix")
    _, version, identity, layers, slot, token, dtype, tokens, blocks, rest, own = HEAD.unpack(start[: HEAD.size])
    if version != VERSION:
        raise Refused("foreign", f"has version {version}, this one reads {VERSION}")
    if identity != layout.identity:
        raise Refused("foreign", "was made with another model, backend, precision or router")
    if (layers, slot, token, dtype) != (
        layout.layers,
        layout.slot_size,
        layout.token_bytes,
        DTYPES.index(layout.dtype),
    ):
        found = DTYPES[dtype] if dtype < len(DTYPES) else f"type {dtype}"
        raise Refused("layout", f"has slots of {slot} tokens in {found}, this engine {layout.slot_size} {layout.dtype}")
    return own, start[: HEAD.size - 4], tokens, blocks, rest


def _check(index: Index, layout: Layout, data_bytes: int) -> None:
    """Every number in its range, and places as appending in order of position makes them."""
    b, size, count = index.blocks, layout.slot_size, len(index.blocks)

    def need(right: bool, what: str) -> None:
        if not right:
            raise Refused("damaged", f"its {what} contradict each other")

    most = data_bytes // layout.slot_bytes // 2 + 1
    for name, low, high in (("layer", 0, layout.layers), ("owner", -1, layout.experts), ("fill", 1, size + 1),
                            ("place", 0, most)):  # fmt: skip
        need(bool((b[name] >= low).all() and (b[name] < high).all()), f"{name}s")
    need(len(np.unique(b["place"])) == count, "places")
    ends = (2 * b["place"].astype(np.int64) + 1) * layout.slot_bytes + b["fill"] * np.int64(layout.token_bytes)
    need(bool((ends <= data_bytes).all()), "places and the length of the data")
    need(bool((index.first >= -1).all() and (index.first < layout.experts).all()), "experts")
    where = index.where
    need(bool((where >= 0).all() and (where < count * size).all()), "positions")
    need(bool((b["layer"][where // size] == np.arange(layout.layers)[:, None]).all()), "layers")
    need(bool((np.bincount(where.ravel() // size, minlength=count) == b["fill"]).all()), "fills")
    for row in where:  # sorted by place, a block's tokens are 0, 1, 2... and rise in position
        order = np.argsort(row, kind="stable")
        place = row[order]
        first = np.r_[True, place[1:] // size != place[:-1] // size]
        rises = np.r_[True, (order[1:] > order[:-1]) & (place[1:] == place[:-1] + 1)]
        need(bool(np.where(first, place % size == 0, rises).all()), "positions")
