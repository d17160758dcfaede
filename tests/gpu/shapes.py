"""Models with random weights in the shapes of real ones: made in seconds, since what is in them changes no time."""

from __future__ import annotations

import mmap
from dataclasses import replace
from functools import cached_property

import numpy as np

from colibri_lab.ops.layout import PAGE, MatrixLayout, expert_layouts
from colibri_lab.ops.types import ExpertPages, ModelWeights
from tests.cuda.sanitized import SHAPES
from tests.ops.models import Maker, Shape, aligned

from .machine import Sizes

PLAIN = Shape(kv_heads=8, head_dim=128, heads=32, group=32, tied=True, positions=64, seats=1, capacity=4)
MIXTRAL = replace(PLAIN, hidden=4096, ffn=14336, experts=8, top_k=2, vocab=32000, layers=1)
QWEN3 = replace(PLAIN, hidden=2048, ffn=768, experts=128, top_k=8, kv_heads=4, vocab=151936, layers=48, qk_norm="head")
# compared with the reference, which takes seconds a step at these sizes
GROUPED = Shape(hidden=2048, ffn=768, experts=16, top_k=8, heads=32, kv_heads=4, head_dim=128, vocab=4096, group=32)
EVEN = Shape(hidden=1024, ffn=1408, heads=16, kv_heads=8, head_dim=64, vocab=2048, dtype="fp16", group=0)
WIDE = {
    "large": replace(GROUPED, qk_norm="head"),
    "large int8": replace(EVEN, experts=8, dtype="int8", group=128, tied=True),
    "large fp16": EVEN,
}
LARGE = Sizes({**SHAPES, **WIDE}, copied=1 << 30, sent=(PAGE, 1 << 20, 64 << 20), slab=256 << 20, layer=MIXTRAL,
              stack=QWEN3, histories=(4096, 32768), vocab=(1000, 32000, 151936), tokens=64, rounds=20)  # fmt: skip
TINY = Sizes({"small": SHAPES["small"]}, copied=4 * PAGE, sent=(PAGE, 2 * PAGE), slab=4 * PAGE,
             layer=Shape(hidden=64, ffn=96, layers=1, tied=True, seats=1),
             stack=Shape(hidden=32, ffn=32, experts=6, layers=2, tied=True, qk_norm="head", seats=1),
             histories=(300,), vocab=(70,), tokens=4, rounds=2)  # fmt: skip


class Quick(Maker):
    """Random codes under one scale for a matrix; all experts are copies of one, in pages of their own."""

    @cached_property
    def noise(self) -> np.ndarray:
        return self.rng.integers(0, 256, 1 << 22, np.uint8)

    def fill(self, out: np.ndarray, layout: MatrixLayout) -> None:
        if not layout.quantised:
            super().fill(out, layout)
            return
        for at in range(layout.start, layout.end, len(self.noise)):
            part = out[at : min(layout.end, at + len(self.noise))]
            part[:] = self.noise[: len(part)]
        size, scale = layout.groups_per_tile * 32, 1 / (8 if layout.dtype == "int4" else 127) / layout.cols**0.5
        for tile in range(layout.tiles):
            at = layout.tile_offset(tile)
            out[at : at + size].view(np.float16)[:] = scale

    def pages(self, weights: ModelWeights, spare: int = 0) -> ExpertPages:
        s, per_expert = self.shape, weights.expert[2].pages
        run = aligned(per_expert * PAGE)
        for layout in weights.expert:
            self.fill(run, layout)
        count = s.layers * s.experts
        frames = whole_pages(count * per_expert * PAGE).reshape(-1, PAGE)
        frames.reshape(count, -1)[:] = run
        return ExpertPages(frames, np.arange(len(frames), dtype=np.int32).reshape(s.layers, s.experts, per_expert))


def whole_pages(size: int) -> np.ndarray:
    """Memory that can be locked: nothing else lies in its pages."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def quick(shape: Shape) -> tuple[ModelWeights, ExpertPages]:
    maker = Quick(shape, 4)
    weights = maker.weights()
    return weights, maker.pages(weights)


def expert_bytes(shape: Shape) -> int:
    """Whole pages of one expert."""
    return expert_layouts(shape.hidden, shape.ffn, shape.dtype, shape.group)[2].pages * PAGE


def fitting(shape: Shape, room: int) -> Shape:
    """With as many layers as have room for their experts in `room` bytes, at least one."""
    return replace(shape, layers=max(1, min(shape.layers, room // (shape.experts * expert_bytes(shape)))))
