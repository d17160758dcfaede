"""Safetensors by hand: eight bytes of length, a JSON header, the data. By hand, so that bad headers can be made too."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Tensor = Array | tuple[str, tuple[int, ...], bytes]  # an array, or (dtype name, shape, raw bytes)

NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}


def to_bf16(values: Array) -> Array:
    """uint16 bit patterns of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_dtype(values: Array, dtype: str) -> Tensor:
    """F32, F16 or BF16 form of an array."""
    if dtype == "BF16":
        return "BF16", values.shape, to_bf16(values).tobytes()
    return np.ascontiguousarray(values, {"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype])


def rounded(values: Array, dtype: str) -> Array:
    """The float32 values that a reader of the `dtype` form sees."""
    if dtype == "BF16":
        return from_bf16(to_bf16(values)).reshape(values.shape)
    return np.asarray(as_dtype(values, dtype)).astype(np.float32)


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[dict[str, Any], bytes]:
    """(header, data) of tensors laid one after another in the given order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, tensor in tensors.items():
        dtype, shape, raw = (
            tensor if isinstance(tensor, tuple) else (NAMES[tensor.dtype], tensor.shape, tensor.tobytes())
        )
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, bytes(data)


def write_raw(
    path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"", *, length: int | None = None, spaces: int = 0
) -> Path:
    """Write any header, right or wrong; `length` overrides the stated header length, `spaces` pads the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * spaces
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    header_order: Iterable[str] | None = None,
    spaces: int = 0,
) -> Path:
    """Write a right file; `header_order` lists the names in another order than their data's."""
    header, data = header_of(tensors, metadata)
    if header_order is not None:
        names = [n for n in ("__metadata__",) if n in header] + list(header_order)
        header = {name: header[name] for name in names}
    return write_raw(path, header, data, spaces=spaces)
