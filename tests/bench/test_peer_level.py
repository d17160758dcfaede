"""Holding transformers' torch to an ISA level: what it is told, what its libraries say, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colibri_lab.bench import main, peer_level
from colibri_lab.bench.peer import PeerError, TransformersPeer, start
from colibri_lab.bench.peer_level import LEVELS, VARIABLES, Said
from colibri_lab.bench.shapes import SHAPES
from colibri_lab.ops.isa import available

ONEDNN = {
    "amx": "Intel AVX10.1 and Intel AMX with bfloat16 and 8-bit integer support",
    "avx512": "Intel AVX 10.1",
    "older": "Intel AVX-512 with Intel DL Boost and bfloat16 support",
    "avx2": "Intel AVX2",
}
MKL = {
    "amx": "Advanced Vector Extensions 512 (AVX-512) with support for INT8, BF16, FP16 (limited) instructions, and "
    "Advanced Matrix Extensions (AMX) with INT8 and BF16",
    "avx512": "Advanced Vector Extensions 512 (AVX-512) with support of Deep Learning Boost (DL Boost) and bfloat16",
    "avx2": "Advanced Vector Extensions 2 (AVX2) enabled processors",
}
FAKE = """#!{python}
import json, os, sys
import numpy as np
for line in sys.stdin:
    asked = json.loads(line)
    op = asked.pop("op")
    if op == "close":
        break
    if op == "load":
        told = " ".join(f"{{name}}={{os.environ[name]}}" for name in {variables!r} if name in os.environ)
        answer = {{"settings": f"isa {{asked['isa']}}, told [{{told}}]"}} if {obeys} else {{"error": "not obeyed"}}
    elif op == "decode":
        answer = {{"prompt": [1.0, 1.0, 0.0], "steps": [[1.0, 1.0, 0.0]] * len(asked["tokens"])}}
    else:
        np.save(asked["path"], np.ones({vocab}, np.float32))
        answer = {{"path": asked["path"]}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def fake(folder: Path, obeys: bool = True) -> str:
    """An interpreter whose child says what it was told, and answers as a peer does."""
    python = folder / "python"
    vocab = SHAPES["nano"].vocab
    python.write_text(FAKE.format(python=sys.executable, variables=VARIABLES, obeys=obeys, vocab=vocab))
    python.chmod(0o755)
    return str(python)


def test_what_each_level_tells() -> None:
    assert peer_level.told(None) == peer_level.told("amx") == {}
    for isa in ("avx512", "avx2"):
        told = peer_level.told(isa)
        assert told["ATEN_CPU_CAPABILITY"] == isa and "AMX" not in told["ONEDNN_MAX_CPU_ISA"]
        assert told["MKL_ENABLE_INSTRUCTIONS"] not in ("AVX512_E4", "AVX512_E5")  # MKL's names for AMX


@pytest.mark.parametrize(("isa", "why"), [("plain", "below SSE4.1"), ("neon", "x86"), ("dotprod", "x86")])
def test_a_level_that_torch_has_not_is_refused(isa: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"--isa {isa} beside transformers: .*{why}.*amx, avx512, avx2"):
        start("transformers", "no-such-python", isa=isa)


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("isa", LEVELS)
def test_the_users_own_variable_is_neither_overridden_nor_overlooked(
    name: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "SSE41")
    with pytest.raises(ValueError, match=rf"{name}=SSE41 is set, and --isa {isa} .*: unset it, or leave --isa out"):
        start("transformers", "no-such-python", isa=isa)
    assert peer_level.told(None) == {}  # without --isa it goes on to the child as it is
    if name in LEVELS[isa]:
        monkeypatch.setenv(name, LEVELS[isa][name].swapcase())
        assert peer_level.told(isa) == LEVELS[isa]


def test_the_command_refuses_what_cannot_be_held(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["prefill", "--shape", "nano", "--peer", "transformers", "--isa"]
    assert main([*small, "plain"]) == 2
    assert "oneDNN has no level below SSE4.1" in capsys.readouterr().err
    for isa in set(available()) & set(LEVELS):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        assert main([*small, isa]) == 2
        assert "ONEDNN_MAX_CPU_ISA=SSE41 is set" in capsys.readouterr().err


def test_the_level_reaches_the_child_and_the_notes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    python = fake(tmp_path)
    for isa in (None, *(level for level in available() if level in LEVELS)):
        small = ["--shape", "nano", "--tokens", "20", "--rounds", "2", "--peer", "transformers"]
        held = [] if isa is None else ["--isa", isa]
        assert main(["prefill", *small, "--peer-python", python, *held, "--json"]) in (0, 3)
        notes = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["notes"]
        told = " ".join(f"{name}={LEVELS[isa][name]}" for name in VARIABLES if isa and name in LEVELS[isa])
        assert any(f"transformers: isa {isa}, told [{told}]" in note for note in notes)
        assert isa is None or any(note.startswith(f"ours: {isa},") for note in notes)


def test_a_child_that_does_not_obey_is_an_error(tmp_path: Path) -> None:
    with TransformersPeer(fake(tmp_path, obeys=False), "avx2") as peer:
        with pytest.raises(PeerError, match="transformers: not obeyed"):
            peer.load(SHAPES["nano"], 0, tmp_path, 1)


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_what_the_libraries_say_is_compared(isa: str) -> None:
    peer_level.check(isa, Said(isa.upper(), ONEDNN[isa], MKL[isa]))
    peer_level.check(isa, Said(isa.upper(), ONEDNN[isa], "none"))  # torch for other processors is without MKL
    with pytest.raises(RuntimeError, match=f"kernels are DEFAULT, not {isa}: ATEN_CPU_CAPABILITY was not taken"):
        peer_level.check(isa, Said("DEFAULT", ONEDNN[isa], MKL[isa]))
    for words in (ONEDNN["amx"], "silent"):
        with pytest.raises(RuntimeError, match=f"oneDNN was to be held to {isa} and says '{words}': ONEDNN_MAX_CPU"):
            peer_level.check(isa, Said(isa.upper(), words, MKL[isa]))
    for words in (MKL["amx"], "silent"):
        with pytest.raises(RuntimeError, match=r"MKL was to be held .*: MKL_ENABLE_INSTRUCTIONS was not taken"):
            peer_level.check(isa, Said(isa.upper(), ONEDNN[isa], words))


def test_avx2_is_narrower_than_every_avx512() -> None:
    for words in (ONEDNN["avx512"], ONEDNN["older"]):
        peer_level.check("avx512", Said("AVX512", words, MKL["avx512"]))
        with pytest.raises(RuntimeError, match="oneDNN"):
            peer_level.check("avx2", Said("AVX2", words, MKL["avx2"]))
    with pytest.raises(RuntimeError, match="MKL"):
        peer_level.check("avx2", Said("AVX2", ONEDNN["avx2"], MKL["avx512"]))


def test_nothing_is_compared_where_nothing_is_held() -> None:
    for isa in (None, "amx"):
        peer_level.check(isa, Said("AVX512", ONEDNN["amx"], "silent"))


class Tensor:
    def __matmul__(self, other: Any) -> Any:
        os.write(1, b"MKL_VERBOSE SGEMM(N,N,64)\n")
        return self

    def to_mkldnn(self) -> Any:
        return self


def torch_that_says(onednn: str | None, mkl: str | None) -> Any:
    """As much of torch as is asked; its libraries print as C does, past Python. None: torch is without it."""

    def library(line: str | None) -> Any:
        @contextmanager
        def verbose(level: int) -> Iterator[None]:
            os.write(1, f"{line}\n".encode())
            yield

        return SimpleNamespace(is_available=lambda: line is not None, VERBOSE_ON=1, verbose=verbose)

    return SimpleNamespace(
        backends=SimpleNamespace(
            mkldnn=library(onednn), mkl=library(mkl), cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX512")
        ),
        nn=SimpleNamespace(functional=SimpleNamespace(linear=lambda a, b: os.write(1, b"onednn_verbose,exec\n"))),
        ones=lambda *sizes: Tensor(),
    )


def test_libraries_are_asked_in_their_own_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture "
    words = (
        "Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with support of Intel(R) Deep Learning Boost "
        "(Intel(R) DL Boost) and bfloat16"
    )
    said = peer_level.ask(
        torch_that_says("onednn_verbose,v1,info,cpu,isa:Intel AVX 10.1", f"{product}{words}, Lnx 2.10GHz lp64 x")
    )
    assert said == Said("AVX512", "Intel AVX 10.1", MKL["avx512"])
    assert str(said) == f"torch's kernels AVX512, oneDNN Intel AVX 10.1, MKL {MKL['avx512']} (not held)"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # the user's own
    assert str(said).endswith("(ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)")
    assert peer_level.ask(torch_that_says("", "")) == Said("AVX512", "silent", "silent")
    assert peer_level.ask(torch_that_says(None, None)) == Said("AVX512", "none", "none")
    assert capfd.readouterr().out == ""  # and standard output is what it was
    os.write(1, b"here")
    assert capfd.readouterr().out == "here"


def test_amx_is_seen_by_what_linux_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process has no tiles, whatever this one has; one that asks has them, where Linux gives them."""
    program = (
        "from colibri_lab.bench.peer_level import tiles; from colibri_lab.ops.isa import available; "
        "print(tiles(), 'amx' in available(), tiles())"
    )
    available()
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "False" and out[1] == out[2] == str("amx" in available())

    monkeypatch.setattr(peer_level, "tiles", lambda: True)
    for isa in ("avx512", "avx2"):
        with pytest.raises(RuntimeError, match=f"AMX's registers, though it was to be held to {isa}"):
            peer_level.check_tiles(isa)
    peer_level.check_tiles("amx")
    peer_level.check_tiles(None)
