"""Our side of a benchmark: the random weights of a shape as a model.colibri, and an engine that holds them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench.harness import Block, measured
from colibri_lab.bench.shapes import GROUP, Role, Shape, draw, draw_router
from colibri_lab.engine.engine import Engine
from colibri_lab.engine.loading import build, open_model, settle
from colibri_lab.model.plan import Piece, make_plan
from colibri_lab.model.spec import ModelSpec, Rope
from colibri_lab.model.store import write_model
from colibri_lab.ops.layout import MatrixLayout
from colibri_lab.ops.pack import pack_codes
from colibri_lab.paths import cache_dir, embedded_model
from colibri_lab.planning.cost import needs
from colibri_lab.telemetry import Telemetry

EMBEDDED = "embedded"  # in place of a shape's name: the model that comes with the project


def folder() -> Path:
    """Where the weights of all benchmarks are kept between runs."""
    return cache_dir() / "bench"


def spec_of(shape: Shape) -> ModelSpec:
    """The shape as a Qwen3-MoE without end tokens, so that a run always has its full length."""
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=shape.positions,
        norm_eps=shape.norm_eps,
        rope=Rope(shape.theta),
        experts=shape.experts,
        top_k=shape.top_k,
        normalise_top_k=True,
        expert_ffn=shape.ffn,
        sparse=(True,) * shape.layers,
        window=(0,) * shape.layers,
        qk_norm="head",
    )


def make_model(shape: Shape, seed: int, apart: float = 1.0) -> Path:
    """Write the weights once; the same file afterwards, so a shape has one `apart`: a factor of the embedding, by which
    rows of a prompt differ and choose different experts. At 1 they hardly do."""
    path = folder() / f"{shape.name}-{seed}" / "model.colibri"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = spec_of(shape)
    layouts = make_plan(spec, "int4", GROUP).expert_layout

    def experts(layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        for role, layout in zip((Role.GATE, Role.UP, Role.DOWN), layouts, strict=True):
            matrix = draw(shape, role, layer, expert, seed)
            pack_codes(matrix.codes(), matrix.scales, layout, out)

    return write_model(
        path, spec, "int4", GROUP, lambda piece: residents(shape, seed, piece, apart), experts, source=shape.name
    )


def residents(shape: Shape, seed: int, piece: Piece, apart: float = 1.0) -> Iterator[NDArray[Any]]:
    """The bytes of one resident tensor, found by its name; apart: see make_model."""
    name, layer = piece.name, 0
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        layer = int(number)
    if name == "embedding":
        yield (apart * draw(shape, Role.EMBEDDING, seed=seed).values()).astype(np.float16)
    elif name == "router":
        yield draw_router(shape, layer, seed)
    elif name.endswith("norm"):
        yield np.ones(piece.shape, np.float32)
    else:
        roles = {"head": (Role.HEAD,), "attention.o": (Role.O,), "attention.qkv": (Role.Q, Role.K, Role.V)}[name]
        drawn = [draw(shape, role, layer, seed=seed) for role in roles]
        assert piece.layout is not None
        yield packed([m.codes() for m in drawn], [m.scales for m in drawn], piece.layout, piece.nbytes)


def packed(codes: list[NDArray[Any]], scales: list[NDArray[Any]], layout: MatrixLayout, size: int) -> NDArray[np.uint8]:
    """A run of `size` bytes with these matrices one below the other."""
    out = np.zeros(size, np.uint8)
    pack_codes(np.concatenate(codes), np.concatenate(scales), layout, out)
    return out


@dataclass(frozen=True)
class Given:
    """Somebody's own model, with what a benchmark has to know of a shape."""

    path: Path
    name: str
    vocab: int
    positions: int
    active_bytes: float
    operations: float


def given(path: Path) -> Given:
    """A model folder or file. ConfigError and ModelError where it is none; a Hugging Face folder is converted first."""
    file, _ = open_model(settle(path, {}))
    with file:
        s, layout = file.spec, make_plan(file.spec, file.quantize, file.group or GROUP)
        need = needs(layout, 1)
        dense = sum(m.rows * m.cols for p in layout.residents if (m := p.layout) is not None and p.name != "head")
        experts = len(s.sparse_layers) * (s.top_k * 3 * s.expert_ffn + s.experts) * s.hidden_size
        return Given(Path(path), Path(path).name, s.vocab_size, s.max_positions,
                     need.dense_read + need.uses * need.expert, 2.0 * (dense + experts))  # fmt: skip


def load(shape: Shape | Given | None, seed: int, threads: int, **settings: Any) -> Engine:
    """An engine on the shape's weights, on a given model or the embedded one, with room for every expert.

    The same weights serve a shape with more positions.
    """
    path = embedded_model() if shape is None else shape.path if isinstance(shape, Given) else make_model(shape, seed)
    config = settle(path, {"threads": threads, **settings})
    engine = Engine(build(config, None if shape is None else shape.positions))
    engine.settings.expert_cache_bytes = engine.describe()["experts_total_bytes"]
    return engine


def listen(engine: Engine, telemetry: Telemetry) -> None:
    """From now on the engine tells another telemetry what it does; a silent one hears of no pages, as when loaded."""
    parts, enabled = engine._parts, telemetry.enabled
    engine._stepper.telemetry = telemetry
    parts.pager.on_page = telemetry.page if enabled else None
    parts.kv.on_slot = telemetry.slot if enabled else None


def decode(engine: Engine, prompt: list[int], tokens: int) -> tuple[Block, Block, list[int]]:
    """(prompt, decode, ids): the prompt with its first token, then `tokens` more, greedily; tokens + 1 ids."""
    stream = engine.generate(prompt, max_tokens=tokens + 1)
    with measured(len(prompt)) as prefill:
        ids = [next(stream).id]
    with measured(tokens) as rest:
        ids += [token.id for token in stream]
    rest.work = len(ids) - 1
    return prefill, rest, ids
