"""Resident weights: read from a model file into one arena of aligned memory, as the arrays that a backend binds."""

from __future__ import annotations

import contextlib
import mmap
import sys
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops.layout import PAGE, ceil_div
from ..ops.types import F32, FFN, U8, AttentionWeights, LayerWeights, Matrix, ModelWeights
from .errors import ModelError
from .header import read_into
from .plan import Piece, Plan
from .spec import rope_tables

_NUMPY = {"U8": np.uint8, "F32": np.float32, "F16": np.float16}
ALIGN = 64


def load_weights(
    plan: Plan, fd: int, path: str, where: Mapping[str, tuple[int, int]], sums: NDArray[np.uint32]
) -> ModelWeights:
    """ModelWeights of an open file.

    where: name -> (begin, end) in the file; sums: crc32 of each resident in plan order.
    """
    spec, arrays = plan.spec, _read(plan, fd, path, where, sums)
    layouts = {piece.name: piece.layout for piece in plan.residents}

    def matrix(name: str) -> Matrix:
        layout = layouts[name]
        assert layout is not None
        return Matrix(layout, arrays[name])

    def swiglu(prefix: str) -> FFN:
        return FFN(matrix(f"{prefix}.gate"), matrix(f"{prefix}.up"), matrix(f"{prefix}.down"))

    def layer(i: int) -> LayerWeights:
        at = f"layers.{i}"
        attention = AttentionWeights(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            qkv=matrix(f"{at}.attention.qkv"),
            o=matrix(f"{at}.attention.o"),
            scale=spec.head_dim**-0.5,
            window=spec.window[i],
            qkv_bias=arrays.get(f"{at}.attention.qkv_bias"),
            o_bias=arrays.get(f"{at}.attention.o_bias"),
            q_norm=arrays.get(f"{at}.attention.q_norm"),
            k_norm=arrays.get(f"{at}.attention.k_norm"),
            clip=spec.clip_qkv,
        )
        return LayerWeights(
            input_norm=arrays[f"{at}.input_norm"],
            post_norm=arrays[f"{at}.post_norm"],
            attention=attention,
            gate=arrays.get(f"{at}.router"),
            dense=None if spec.sparse[i] else swiglu(f"{at}.dense"),
            shared=swiglu(f"{at}.shared") if spec.sparse[i] and spec.shared_ffn else None,
            shared_gate=arrays.get(f"{at}.shared_gate"),
        )

    cos, sin = rope_tables(spec)
    return ModelWeights(
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        norm_eps=spec.norm_eps,
        top_k=spec.top_k,
        normalise_top_k=spec.normalise_top_k,
        experts=spec.experts,
        layers=tuple(layer(i) for i in range(spec.layers)),
        expert=plan.expert_layout,
        final_norm=arrays["final_norm"],
        head=matrix("head"),
        embedding=arrays.get("embedding"),
        cos=cos,
        sin=sin,
    )


def _read(
    plan: Plan, fd: int, path: str, where: Mapping[str, tuple[int, int]], sums: NDArray[np.uint32]
) -> dict[str, Any]:
    """name -> array of every resident tensor. Matrices come as uint8 [pages * 65536], the rest in its own shape."""
    total = sum(ceil_div(piece.nbytes, ALIGN) * ALIGN for piece in plan.residents)
    arena, at = allocate(total, path), 0
    arrays: dict[str, Any] = {}
    with ThreadPoolExecutor(1, "residents") as reader:  # what has come is summed while the next is read
        coming = []
        for piece in plan.residents:
            part = arena[at : at + piece.nbytes]
            at += ceil_div(piece.nbytes, ALIGN) * ALIGN
            coming.append((piece, part, reader.submit(read_into, fd, where[piece.name][0], part.data, path)))
        try:
            for index, (piece, part, there) in enumerate(coming):
                there.result()
                if zlib.crc32(part.data) != sums[index]:
                    raise ModelError(
                        f"{path}: tensor {piece.name!r} does not match its checksum: damaged, convert the model again"
                    )
                values = part.view(_NUMPY[piece.dtype])
                arrays[piece.name] = values if piece.layout is not None else _shaped(values, piece)
        except BaseException:
            reader.shutdown(cancel_futures=True)
            raise
    return arrays


def _shaped(values: NDArray[Any], piece: Piece) -> F32:
    shaped: F32 = values.reshape(piece.shape)
    return shaped


def allocate(size: int, path: str) -> U8:
    """Zeroed memory that begins at a page, private to the process and in huge pages where the system has them."""
    size = ceil_div(max(size, 1), PAGE) * PAGE
    try:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, size)
        else:  # Python's default is shared memory, which gets no huge pages
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _want_huge_pages(memory)
    except (OSError, ValueError, OverflowError) as error:
        raise ModelError(
            f"{path}: its resident weights need {size} bytes of memory, which cannot be had ({error})"
        ) from error
    return np.frombuffer(memory, np.uint8)


def _want_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: plain pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
