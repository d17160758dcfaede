"""A Hugging Face folder in, a model.colibri folder out; whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.errors import ModelError
from ..model.jsonfile import check_present, dumps, strict
from ..model.plan import Piece, Plan, make_plan
from ..model.spec import ModelSpec
from ..model.store import FILE_NAME
from ..model.writer import header_bytes, write_model
from .checkpoint import Checkpoint
from .checks import check_plain, check_tensors, read_facts, resolve_tying
from .names import Names, Part
from .progress import bar
from .quantise import F32, U8, RowsOf, blocks_of, check_half, pack_matrix, stream_matrix
from .staging import Staging

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
Progress = Callable[[int, int], None]


def convert(
    source_dir: Path | str,
    out_dir: Path | str,
    *,
    quantize: str = "int4",
    group_size: int = 32,
    expert_split: int | None = None,
    progress: bool | Progress | None = None,
    overwrite: bool = False,
) -> Path:
    """Convert a Hugging Face model folder and return out_dir, which then holds model.colibri, config.json and the
    tokenizer.

    quantize: fp32 | fp16 | int8 | int4, group_size 32 | 64 | 128 inputs share a scale in int8 and int4. expert_split:
    if given, must be the model's number of experts. progress: True draws a bar on stderr, a function gets (bytes
    done, bytes in all). Memory stays at about one converted expert. ModelError: one line naming file and tensor;
    then, and after an interrupt, nothing new is under out_dir and an older conversion is untouched.
    """
    source_path, out = Path(source_dir), Path(out_dir)
    with Checkpoint(source_path) as source:
        spec = read_facts(source, expert_split)
        make_plan(spec, quantize, group_size)
        check_target(source_path, out, overwrite)
        source.open_weights()
        check_plain(source)
        spec = resolve_tying(source, spec)
        plan = make_plan(spec, quantize, group_size)
        names = Names(spec, frozenset(source.tensors))
        check_tensors(source, plan, names)
        extras = tokenizer_files(source_path)
        name = source_name(source_path)
        check_space(
            out, len(header_bytes(plan, "0" * 64, name)) + plan.data_bytes + sum(p.stat().st_size for p in extras)
        )
        source.note(dumps(spec.to_json()))
        with Staging(out, last=FILE_NAME) as stage, _progress(progress, name) as report:
            for path in extras:
                shutil.copyfile(path, stage / path.name)
            (stage / "config.json").write_text(config_text(source.config, spec), encoding="utf-8")
            write_weights(stage / FILE_NAME, source, plan, names, name, report)
    return out


def write_weights(path: Path, source: Checkpoint, plan: Plan, names: Names, name: str, report: Progress | None) -> None:
    """The model file itself, from an inspected checkpoint."""

    def experts(layer: int, expert: int, out: U8) -> None:
        for part, layout in zip(names.expert(layer, expert), plan.expert_layout, strict=True):
            pack_matrix(rows_of(source, (part,)), layout, out, _called(source, part), pool)

    def residents(piece: Piece) -> Iterator[NDArray[Any]]:
        parts = names.resident(piece.name)
        called = _called(source, parts[0])
        if piece.layout is not None:
            yield from stream_matrix(rows_of(source, parts), piece.layout, called)
            return
        for part in parts:
            cols = part.cols or 1
            for first, last in blocks_of(part.rows, cols):
                values = source.read(part.tensor, part.first + first, last - first, cols)
                yield check_half(values, called) if piece.dtype == "F16" else values

    with ThreadPoolExecutor(min(8, usable_cores()), "convert") as pool:
        write_model(
            path,
            plan.spec,
            plan.quantize,
            plan.group,
            residents,
            experts,
            identity=source.identity,
            source=name,
            progress=report,
        )


def rows_of(source: Checkpoint, parts: tuple[Part, ...]) -> RowsOf:
    """Rows of a matrix that is made of source tensors one below the other."""

    def read(first: int, last: int) -> F32:
        found, at = [], 0
        for part in parts:
            begin, end = max(first, at), min(last, at + part.rows)
            if begin < end:
                whole = source.shape_of(part.tensor)
                row = part.first + begin - at + (part.index * whole[1] if part.index is not None else 0)
                found.append(source.read(part.tensor, row, end - begin, part.cols))
            at += part.rows
        return found[0] if len(found) == 1 else np.concatenate(found)

    return read


def check_target(source: Path, out: Path, overwrite: bool) -> None:
    """ModelError when the output may not go there."""
    if out.is_symlink() and not out.exists():
        raise ModelError(f"{out}: is a link to nothing")
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out}: is a file, not a folder")
    if out.exists() and out.samefile(source):
        raise ModelError(f"{out}: is the source folder itself: choose another one for the output")
    if (out / FILE_NAME).exists() and not overwrite:
        raise ModelError(f"{out / FILE_NAME}: exists already: choose another folder, or overwrite it")


def check_space(out: Path, need: int) -> None:
    """ModelError when the file system of `out` has fewer than `need` bytes (and a little) left."""
    there = out.absolute()
    while not there.exists():
        there = there.parent
    free, need = shutil.disk_usage(there).free, need + (1 << 20)
    if free < need:
        raise ModelError(f"{out}: needs {need / 2**20:.0f} MiB, only {free / 2**20:.0f} MiB are free there")


def tokenizer_files(folder: Path) -> list[Path]:
    """Tokenizer and generation files of a folder; ModelError for a dangling link or an empty file among them."""
    found = [folder / name for name in TOKENIZER_FILES if os.path.lexists(folder / name)]
    for path in found:
        check_present(path)
    return found


def config_text(config: dict[str, Any], spec: ModelSpec) -> str:
    """config.json of the output, strict JSON: the source's, with end tokens merged and tying as it was found."""
    kept = {key: value for key, value in strict(config).items() if key != "quantization_config"}
    kept |= {"bos_token_id": spec.bos, "eos_token_id": list(spec.eos) or None, "tie_word_embeddings": spec.tied}
    return dumps(kept, indent=1) + "\n"


def source_name(folder: Path) -> str:
    """The folder's own name; in a Hub cache, the model's. Bytes that are no UTF-8 become question marks."""
    folder = folder.absolute()
    name = folder.name
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return name.encode(errors="replace").decode()


def usable_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _called(source: Checkpoint, part: Part) -> str:
    return f"{source.path_of(part.tensor)}: tensor {part.tensor!r}"


def _progress(progress: bool | Progress | None, name: str) -> AbstractContextManager[Progress | None]:
    if progress is True:
        return bar(f"converting {name}")
    return nullcontext(progress if callable(progress) else None)
