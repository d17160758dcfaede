"""A2, C2, E7: what is odd, unread or replaced in files, seen in what the engine computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.model.header import read_header
from colibri_lab.ops.layout import MatrixLayout
from colibri_lab.ops.pack import pack_codes, pack_float
from colibri_lab.ops.types import FFN, Matrix, ModelWeights
from tests.makers import make
from tests.oracle.goldens import error
from tests.oracle.numpy_oracle import Oracle
from tests.parity.models import engine, greedy, levels, logits

PROMPT = np.random.default_rng(8).integers(3, 60, 20).tolist()
U8 = np.ndarray[Any, np.dtype[np.uint8]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no strict JSON")


@pytest.mark.parametrize("odd", ["infinity", "windows"])
def test_a2_odd_json_gives_the_same_model_and_strict_json(odd: str, tmp_path: Path) -> None:
    made = make("mixtral", 51)
    right = convert(made.save(tmp_path / "hf"), tmp_path / "right", quantize="fp32")
    source = made.save(tmp_path / "odd-hf")
    text = (source / "config.json").read_text()
    if odd == "infinity":
        text = text.replace("{", '{"time_step_limit": [0.0, Infinity],', 1)
        (source / "config.json").write_text(text)
        assert json.loads(text)["time_step_limit"][1] == float("inf")
    else:
        (source / "config.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    ours = convert(source, tmp_path / "odd", quantize="fp32")
    with (ours / "model.colibri").open("rb") as file:
        metadata = read_header(file.fileno(), "model").metadata
    json.loads(metadata["spec"], parse_constant=refuse)
    json.loads((ours / "config.json").read_text(encoding="utf-8"), parse_constant=refuse)
    with engine(ours) as one, engine(right) as other:
        assert np.array_equal(logits(one, PROMPT), logits(other, PROMPT))
        json.dumps(one.describe(), allow_nan=False)


def poison_of(layout: MatrixLayout, size: int) -> U8:
    """0xFF in every bit of the run that is padding of this matrix's tiles: past N, past K, and past the last tile."""
    run = np.zeros(size, np.uint8)
    shape = (layout.rows, layout.cols)
    if layout.quantised:
        groups = -(-layout.cols // layout.group)
        scales = np.full((layout.rows, groups), np.array(0x3F3F, np.uint16).view(np.float16))
        codes = np.full(shape, 15, np.uint8) if layout.dtype == "int4" else np.full(shape, -1, np.int8)
        pack_codes(codes, scales, layout, run)
        split = layout.groups_per_tile * 32
        for tile in range(layout.tiles):  # scales: a byte is either all data or all padding
            at = layout.tile_offset(tile)
            run[at : at + split][run[at : at + split] != 0] = 0xFF
    else:
        item = {"fp32": np.uint32(0x3F3F3F3F), "fp16": np.uint16(0x3F3F)}[layout.dtype]
        value = np.array(item).view({"fp32": np.float32, "fp16": np.float16}[layout.dtype])
        pack_float(np.full(shape, value), layout, run)
        run[run != 0] = 0xFF
    return ~run


def matrices(weights: ModelWeights) -> list[Matrix]:
    found = [weights.head]
    for layer in weights.layers:
        found += [layer.attention.qkv, layer.attention.o]
        for network in (layer.dense, layer.shared):
            if isinstance(network, FFN):
                found += [network.gate, network.up, network.down]
    return found


@pytest.mark.parametrize("level", ["reference", *levels()])
@pytest.mark.parametrize(
    ("quantize", "precision"),
    [("fp32", "exact"), ("fp16", "exact"), ("int8", "fast"), ("int4", "exact"), ("int4", "fast")],
)
def test_c2_padding_is_never_read(quantize: str, precision: str, level: str, tmp_path: Path) -> None:
    """Hidden 40, expert width 25, vocabulary 61, one dense layer: NaN and garbage in all padding change no bit."""
    shape = {"hidden_size": 40, "moe_intermediate_size": 25, "vocab_size": 61, "intermediate_size": 44}
    made = make("qwen2_moe", 52, num_hidden_layers=3, mlp_only_layers=[1], shared_expert_intermediate_size=19, **shape)
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize=quantize)
    how = {"backend": level} if level == "reference" else {"isa": level}
    with engine(path, precision=precision, **how) as clean:
        right = logits(clean, PROMPT)
    with engine(path, precision=precision, **how) as model:
        parts, touched = model._parts, 0
        backend = parts.backend
        for matrix in matrices(backend.weights if level == "reference" else backend._bound.weights):
            padding = poison_of(matrix.layout, matrix.data.size)
            touched += int(np.count_nonzero(padding))
            np.bitwise_or(matrix.data, padding, out=matrix.data)
        gate, up, down = parts.file.expert_layout
        size = parts.file.expert_pages * 65536
        padding = poison_of(gate, size) & poison_of(up, size) & poison_of(down, size)
        load = parts.pager._transfer.load

        def load_and_poison(jobs: Any) -> None:
            load(jobs)
            for job in jobs:
                view = np.frombuffer(parts.pager.frames.view(job.run), np.uint8)
                np.bitwise_or(view, padding, out=view)

        parts.pager._transfer.load = load_and_poison
        ours = logits(model, PROMPT)
    assert touched > 10_000 and np.isfinite(ours).all()
    assert np.array_equal(ours.view(np.uint32), right.view(np.uint32))


def test_e7_a_running_engine_goes_on_with_the_old_file(tmp_path: Path) -> None:
    """The least budget, so that pages are read again and again; the file under the engine becomes another model's."""
    old, new = make("olmoe", 53), make("olmoe", 54)
    path = convert(old.save(tmp_path / "old"), tmp_path / "out", quantize="fp32")
    right, other = (Oracle(made.config, made.tensors).logits(PROMPT) for made in (old, new))
    with engine(path, expert_cache_bytes=2 * 65536) as running:
        stream = running.generate(PROMPT, max_tokens=12)
        first = next(stream).id
        convert(new.save(tmp_path / "new"), tmp_path / "out", quantize="fp32", overwrite=True)
        faults = running.counters()["pager"]["faults"]
        tokens = [first, *(token.id for token in stream)]
        assert running.counters()["pager"]["faults"] > faults
        assert tokens == Oracle(old.config, old.tensors).greedy(PROMPT, 12)[0]
        assert error(logits(running, PROMPT), right) < 1e-5
    with engine(path) as fresh:
        assert error(logits(fresh, PROMPT), other) < 1e-5
        assert greedy(fresh, PROMPT, 12) == Oracle(new.config, new.tensors).greedy(PROMPT, 12)[0]
