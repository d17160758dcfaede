"""Is this checkpoint whole, and one that we can take? All checks that need no weight, before anything is written."""

from __future__ import annotations

import warnings
from dataclasses import replace

from ..model.errors import ModelError, ModelWarning
from ..model.families import read_spec
from ..model.plan import Plan
from ..model.spec import ModelSpec
from .checkpoint import FLOATS, Checkpoint
from .names import EMBEDDING, HEAD, SKIPPED, Names, Part
from .quantise import blocks_of


def read_facts(source: Checkpoint, expert_split: int | None) -> ModelSpec:
    """The spec as config.json has it. ModelError: unknown, dense, or not the stated number of experts."""
    spec = read_spec(source.config, str(source.config_path), source.generation)
    if expert_split is not None and expert_split != spec.experts:
        raise ModelError(
            f"{source.config_path}: the model has {spec.experts} experts a layer, --expert-split says {expert_split}"
        )
    return spec


def resolve_tying(source: Checkpoint, spec: ModelSpec) -> ModelSpec:
    """The spec with `tied` as the weights have it.

    tie_word_embeddings true and no head stored: tied. A head stored too: tied if it equals the embedding, else
    ModelWarning and the stored head is used, as transformers does. Only a head stored: it is the embedding too.
    False: a head is needed.
    """
    tensors = source.tensors
    if not spec.tied:
        if HEAD not in tensors:
            raise ModelError(
                f"{source.folder}: tensor {HEAD!r} is missing and tie_word_embeddings is false: set "
                f"it to true in config.json "
                "if the head is the embedding"
            )
        return spec
    if HEAD not in tensors or EMBEDDING not in tensors:
        return spec
    for name in (EMBEDDING, HEAD):
        _check(source, Part(name, spec.vocab_size, spec.hidden_size), (spec.vocab_size, spec.hidden_size))
    if _equal(source, spec):
        return spec
    warnings.warn(
        f"{source.config_path}: tie_word_embeddings is true, but {HEAD} and {EMBEDDING} are both "
        f"stored and differ: the stored "
        "head is used. Set tie_word_embeddings to false to silence this.",
        ModelWarning,
        stacklevel=2,
    )
    return replace(spec, tied=False)


def _equal(source: Checkpoint, spec: ModelSpec) -> bool:
    cols = spec.hidden_size
    for first, last in blocks_of(spec.vocab_size, cols):
        rows = [source.read(name, first, last - first, cols) for name in (EMBEDDING, HEAD)]
        if not (rows[0] == rows[1]).all():
            return False
    return True


def check_plain(source: Checkpoint) -> None:
    """ModelError for a checkpoint that is quantised already; its method is named where config.json states one."""
    method = _method(source)
    for name, entry in source.tensors.items():
        if entry.dtype in FLOATS or name.endswith(SKIPPED):
            continue
        where = f"{source.path_of(name)}: tensor {name!r} is {entry.dtype}"
        if entry.dtype in ("F64", "C64", "BOOL"):
            raise ModelError(f"{where}: only {', '.join(FLOATS)} are read: save the model in one of them")
        raise ModelError(
            f"{where}: the checkpoint is quantised already ({method or 'method not stated'}): convert the original one"
        )


def check_tensors(source: Checkpoint, plan: Plan, names: Names) -> None:
    """Every tensor that the plan needs is there in the right shape, and no other is: nothing is left out in silence."""
    used: set[str] = set()

    def need(part: Part) -> None:
        used.add(part.tensor)
        _check(source, part, names.shape(part))

    for piece in plan.residents:
        for part in names.resident(piece.name):
            need(part)
    for layer in plan.spec.sparse_layers:
        for expert in range(plan.spec.experts):
            for part in names.expert(layer, expert):
                need(part)
    if plan.spec.tied:
        used.add(HEAD)
    method = _method(source)
    unused = sorted(name for name in source.tensors if name not in used and not name.endswith(SKIPPED))
    if unused:
        hint = f" (config.json says quantised with {method})" if method else ""
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ModelError(
            f"{source.path_of(unused[0])}: tensor {unused[0]!r:.200}{more} would not be used by "
            f"{plan.spec.family}{hint}: "
            "a model that needs it would come out wrong"
        )
    if method:
        warnings.warn(
            f"{source.config_path}: quantization_config ({method}) is stale: every weight is plain "
            f"float and is used as it is",
            ModelWarning,
            stacklevel=2,
        )


def _check(source: Checkpoint, part: Part, shape: tuple[int, ...]) -> None:
    entry = source.tensors.get(part.tensor)
    if entry is None:
        raise ModelError(f"{source.folder}: tensor {part.tensor!r} is missing")
    if entry.shape != shape:
        # a gate saved as [H] instead of [1, H] holds the same bytes
        if tuple(n for n in entry.shape if n != 1) == tuple(n for n in shape if n != 1):
            return
        raise ModelError(
            f"{source.path_of(part.tensor)}: tensor {part.tensor!r} has shape {list(entry.shape)}, "
            f"config.json wants {list(shape)}"
        )


def _method(source: Checkpoint) -> str:
    stated = source.config.get("quantization_config")
    if not stated:
        return ""
    method = stated.get("quant_method") or stated.get("quant_algo") if isinstance(stated, dict) else None
    return str(method or "method not stated")[:40]
