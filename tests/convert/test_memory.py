"""Converting a checkpoint many times larger than memory would be fine: peak memory in a child process, on 400 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.makers import as_dtype, base_config, make
from tests.makers.safetensors_writer import header_of

CODE = """
import sys
from colibri_lab.convert import convert

def memory(name):  # of this program alone; getrusage's peak would begin at that of the process which started it
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

convert(sys.argv[1], sys.argv[2], quantize=sys.argv[5])  # everything is imported and warm now
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = memory("VmRSS")
if sys.argv[6] == "read it all":
    whole = open(sys.argv[3] + "/model.safetensors", "rb").read()
else:
    convert(sys.argv[3], sys.argv[4], quantize=sys.argv[5])
print(memory("VmHWM") - before)
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


BOUND = 2 * (3 * HIDDEN * FFN * 2) + VOCAB * HIDDEN * 2  # two experts and the largest tensor of a shard


def growth(big: Path, at: Path, quantize: str, what: str) -> int:
    """By how many bytes the peak of a child process grew."""
    small = make("mixtral").save(at / "small")
    args = [small, at / "o1", big, at / "o2", quantize, what]
    command = [sys.executable, "-c", CODE, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("quantize", ["int4", "fp32"])
def test_peak_memory(big: Path, tmp_path: Path, quantize: str) -> None:
    grown = growth(big, tmp_path, quantize, "convert")
    os.truncate(tmp_path / "o2" / "model.colibri", 0)  # give the disk back
    assert 1 << 20 < grown < BOUND


def test_reading_it_whole_would_be_seen(big: Path, tmp_path: Path) -> None:
    assert growth(big, tmp_path, "int4", "read it all") > 10 * BOUND
