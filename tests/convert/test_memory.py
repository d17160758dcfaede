"""Converting a checkpoint many times larger than memory would be fine: peak memory in a child process, on 400 MB."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.makers import as_dtype, base_config, make
from tests.makers.safetensors_writer import header_of

CODE = """
import resource, sys
from colibri_lab.convert import convert
convert(sys.argv[1], sys.argv[2], quantize="fp32")  # everything is imported and warm now
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[3], sys.argv[4], quantize=sys.argv[5])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
HIDDEN, FFN, EXPERTS, LAYERS, VOCAB = 1024, 1536, 12, 3, 4000


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 400 MB in BF16, written tensor by tensor; an expert has 9.4 MB, the embedding 8.2 MB."""
    folder = tmp_path_factory.mktemp("big")
    config = base_config(
        "mixtral",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_local_experts=EXPERTS,
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
    )
    (folder / "config.json").write_text(json.dumps(config))
    small = make("mixtral", hidden_size=64, intermediate_size=96, num_local_experts=EXPERTS, num_hidden_layers=LAYERS)
    rng = np.random.default_rng(0)
    noise = as_dtype(rng.normal(0, 0.02, (VOCAB, HIDDEN)).astype(np.float32), "BF16")[2]  # type: ignore[index]
    grown = {64: HIDDEN, 96: FFN, EXPERTS: EXPERTS}
    entries, at = {}, 0
    for name, tensor in small.tensors.items():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            shape = [VOCAB, HIDDEN]
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            shape = [HIDDEN // 2, HIDDEN]
        else:
            shape = [grown[n] for n in tensor.shape]
        size = int(np.prod(shape)) * 2
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header, _ = header_of({})
    text = json.dumps(header | entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            file.write(noise[: size % len(noise)] if size < len(noise) else (noise * (size // len(noise) + 1))[:size])
    assert 300e6 < (folder / "model.safetensors").stat().st_size < 500e6
    return folder


@pytest.mark.parametrize("quantize", ["int4", "fp32"])
def test_peak_memory(big: Path, tmp_path: Path, quantize: str) -> None:
    small = make("mixtral").save(tmp_path / "small")
    args = [small, tmp_path / "o1", big, tmp_path / "o2", quantize]
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, args)], capture_output=True, text=True, timeout=120, check=True)
    expert = 3 * HIDDEN * FFN * 2
    largest = VOCAB * HIDDEN * 2
    assert int(done.stdout) < 2 * expert + largest + (4 << 20)
    os.truncate(tmp_path / "o2" / "model.colibri", 0)  # give the disk back


def test_the_bound_means_something() -> None:
    """The control: a program that reads the checkpoint whole would be seen."""
    code = "import resource, numpy\na = numpy.ones(50 << 20, 'u1')\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(seen.stdout) * 1024 > 50 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
