"""From a path or settings to the parts of an engine, each built once and bound together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import placement
from ..config import Config
from ..dispatch.rings import Rings
from ..dispatch.split import Split
from ..dispatch.waves import Dispatcher
from ..errors import ConfigError
from ..kv.cache import KVCache
from ..kv.persist import Persistence
from ..kv.rule import RECENT, SINKS
from ..kv.slots import SlotPool, allocate
from ..memory import usable_cores
from ..model.store import ModelFile
from ..model.tokenizer import Tokenizer
from ..model.transformer import Transformer
from ..ops.cuda import CudaBackend
from ..ops.cuda_experts import Sharing
from ..ops.routing import Routing
from ..ops.runs import Running
from ..ops.select import choose_backend
from ..ops.types import ON_CPU, Backend, Rows, Staged
from ..pager.early import EarlyReads
from ..pager.lookahead import Lookahead
from ..pager.pager import Pager
from ..pager.prefetchers import make_prefetchers
from ..pager.reading import open_transfer
from ..router.hook import RouterHook
from ..router.settle import settle_router, settle_weights
from ..telemetry import NullTelemetry, Telemetry
from .choosing import Choosing, choosing_for
from .host import Host
from .identity import open_persistence
from .pipeline import Pipeline, Unit
from .runs import LayerRuns
from .whole import WholeSteps

PIECE = 1 << 20  # bytes of expert pages that a kernel is told of at a time in async mode
YAML = (".yaml", ".yml", ".json")


@dataclass
class Parts:
    """What an engine is made of."""

    config: Config
    file: ModelFile
    tokenizer: Any
    backend: Backend
    why: str
    host: Host
    threads: int
    rows: Rows
    pager: Pager
    kv: KVCache
    persistence: Persistence | None
    dispatcher: Dispatcher
    router: RouterHook | None
    routing: Routing
    top_k: int
    rounded: int  # router weights that router_dtype changed
    ahead: Lookahead
    early: EarlyReads | None
    transformer: Transformer
    telemetry: Any
    max_positions: int
    choosing: Choosing


def settle(source: str | Path | Config, overrides: dict[str, Any]) -> Config:
    """The settings of a Config, of a YAML file, or of a model's path."""
    if isinstance(source, Config):
        config = source.replace(**overrides) if overrides else source
    elif Path(source).suffix.lower() in YAML and not Path(source).is_dir():
        config = Config.from_yaml(source, **overrides)
    else:
        if "model_path" in overrides:
            raise ConfigError("settings: model_path: given twice, as the first argument and by name")
        config = Config.make({"model_path": str(source), **overrides})
    if config.model_path is None:
        raise ConfigError(f"{source if isinstance(source, (str, Path)) else 'settings'}: model_path: names no model")
    return config


def open_model(config: Config, positions: int | None = None) -> tuple[ModelFile, Path]:
    """The converted model and its tokenizer's folder; a Hugging Face folder is converted into the cache first."""
    path = config.model_path
    assert path is not None
    if not path.exists():
        raise ConfigError(f"{path}: no such model file or folder")
    converted = path if path.is_file() else path / "model.colibri"
    if path.is_dir() and not converted.exists():
        if not (path / "config.json").exists():
            raise ConfigError(f"{path}: holds neither model.colibri nor config.json, so it is no model folder")
        from ..convert import ensure_converted

        converted = ensure_converted(path, config.quantize or "int4", config.group_size or 32)
    file = ModelFile.open(converted, positions)
    asked = {
        "quantize": config.quantize,
        "group_size": config.group_size if file.quantize in ("int8", "int4") else None,
    }
    for (name, value), has in zip(asked.items(), (file.quantize, file.group), strict=True):
        if value is not None and value != has:
            file.close()
            raise ConfigError(
                f"{converted}: {name}: the file was converted with {has}, not {value}; "
                f"convert it again, or leave the key out"
            )
    return file, config.tokenizer_path or (path if path.is_dir() else path.parent)


def sight(config: Config) -> tuple[int, int]:
    """(newest, first) tokens that a query always sees; (0, 0) for exact attention, which sees all."""
    if config.attention == "exact":
        return 0, 0
    if config.prefill_chunk > RECENT:
        raise ConfigError(
            f"prefill_chunk: {config.prefill_chunk} is more than the {RECENT} tokens that attention: expert_local "
            f"always sees, so chunks would change the text; choose at most {RECENT}"
        )
    return RECENT, SINKS


def refuse_without_gpu(config: Config, backend: str, places: NDArray[np.int8] | None) -> None:
    """ConfigError for a key of the GPU where there is none, or nothing for it to change. places: of experts [L, E]."""
    needs = {
        "expert_placement": places is not None and bool((places != ON_CPU).any()),
        "gpu_cache_bytes": config.gpu_cache_bytes is not None,
        "cuda_graphs": config.cuda_graphs != "auto",
        "gpu_reset_on_exit": config.gpu_reset_on_exit,
    }
    for key, asked in needs.items():
        if asked and not (backend == "cuda" or (backend == "sim" and key != "gpu_reset_on_exit")):
            raise ConfigError(f"settings: {key}: backend {backend} uses no GPU; leave it out, or set backend: cuda")
    if config.gpu_cache_bytes is not None and places is not None and (places == ON_CPU).all():
        raise ConfigError("settings: gpu_cache_bytes: expert_placement leaves no expert to the GPU; leave it out")


def _moved(telemetry: Any, pager: Pager, kind: int, layer: int, expert: int) -> None:
    """Tell telemetry of an expert that came to the GPU or left it."""
    telemetry.page(clock(), kind, layer, expert, pager.frames.pages, 0, pager.step)


def build(config: Config, positions: int | None = None) -> Parts:
    """All parts, bound. What was opened is closed again when a later part fails.

    positions: another context length than the model's, for measurements on random weights.
    """
    with ExitStack() as stack:
        file, folder = open_model(config, positions)
        stack.callback(file.close)
        spec = file.spec
        tokenizer = Tokenizer.open(folder)
        if config.tokenizer_path and tokenizer.kind == "ids":
            raise ConfigError(f"tokenizer_path: {folder}: no tokenizer.json and no tokenizer.model is there")
        host = Host(config.io_priority, config.cpu_affinity_mask)  # before any thread of ours is started
        stack.callback(host.restore)
        threads = config.threads or usable_cores()
        rules = placement.rules(config.expert_placement)
        places = placement.resolve(rules, spec.sparse, spec.experts) if rules else None
        sharing = Sharing(config.gpu_cache_bytes, places, threads)
        backend, why = choose_backend(config.backend, config.precision, threads, sharing, config.gpu_reset_on_exit,
                                      config.cuda_graphs != "off")  # fmt: skip
        stack.callback(backend.close)
        refuse_without_gpu(config, backend.name, places)
        weights, rounded = settle_weights(file.weights(), config)
        foreign, top_k = settle_router(config), weights.top_k
        routing = weights.routing
        assert routing is not None
        telemetry = (Telemetry if config.telemetry else NullTelemetry)(spec.layers, spec.experts, top_k)
        on_page, on_slot = (telemetry.page, telemetry.slot) if config.telemetry else (None, None)

        asynchronous = config.engine_mode == "async"
        transfer = open_transfer(file, config.io_threads, PIECE if asynchronous else None, backend.name == "cpu")
        stack.callback(transfer.close)
        pager = Pager(
            layers=spec.layers, experts=spec.experts, sparse=spec.sparse, top_k=top_k, pages=file.expert_pages,
            budget=config.expert_cache_bytes, policy=config.eviction_policy, transfer=transfer, on_page=on_page,
            pin_after=config.pin_after_tokens, pin_share=config.pin_max_share,
        )  # fmt: skip
        capacity = config.max_batch_size + config.prefill_chunk
        rows = Rows.allocate(capacity, spec.hidden_size, spec.experts, top_k, spec.vocab_size)
        positions = int(weights.cos.shape[0])
        seats = config.max_batch_size + 1  # one for Engine.logits beside the running requests
        pool = allocate(config.kv_cache_max_slots, config.kv_cache_slot_size, capacity, spec.kv_heads, spec.head_dim,
                        config.kv_cache_dtype, seats, spec.layers, positions, *sight(config))  # fmt: skip
        kv = KVCache(
            pool,
            SlotPool(config.kv_cache_max_slots, config.kv_cache_slot_size),
            spec.layers,
            rows.kv_dst,
            on_slot=on_slot,
        )
        persistence = open_persistence(config, file, backend, kv, top_k, foreign, telemetry.note)
        if persistence is not None:
            stack.callback(persistence.close)
        backend.bind(weights, pool, pager.arrays, rows)
        above = backend.tier if isinstance(backend, CudaBackend) else None
        if above is not None:
            pager.attach(above)
            if config.telemetry:
                above.tell = partial(_moved, telemetry, pager)
        router = None if foreign is None else RouterHook(foreign, rows, routing if config.router_audit else None)
        dispatcher = Dispatcher(spec.experts, top_k)
        ahead = Lookahead(pager, partial(make_prefetchers, rows=rows, weights=weights), config.expert_prefetch_pages)
        ahead.follow(config.prefetcher)
        staged = routing.kind == "two_stage" and router is None and isinstance(backend, Staged)
        early = EarlyReads(pager, ahead, rows, threads) if staged else None
        seen = backend, rows, spec.sparse, pager, kv, dispatcher, router, ahead if ahead.active else None, early
        rings = Rings[Unit](config.dispatch_ring_size, config.dispatch_watermark)
        transformer = Pipeline(rings, Split(config.attention == "exact"), *seen) if asynchronous else Transformer(*seen)
        if isinstance(backend, CudaBackend):
            transformer.whole = WholeSteps(backend, pager, dispatcher, spec.sparse, router is not None,
                                           config.cuda_graphs)  # fmt: skip
        elif isinstance(backend, Running) and router is None:
            transformer.whole = LayerRuns(backend, pager, dispatcher, spec.sparse, asynchronous)
        stack.pop_all()
    return Parts(
        config,
        file,
        tokenizer,
        backend,
        why,
        host,
        threads,
        rows,
        pager,
        kv,
        persistence,
        dispatcher,
        router,
        routing,
        top_k,
        rounded,
        ahead,
        early,
        transformer,
        telemetry,
        positions,
        choosing_for(backend),
    )
