"""The benchmark's transformers, held to an ISA level by the real libraries of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri_lab.bench import peer_level
from colibri_lab.bench.peer import PeerError, TransformersPeer
from colibri_lab.bench.shapes import SHAPES
from colibri_lab.ops.isa import available

pytestmark = pytest.mark.oracle
HELD = [level for level in ("avx512", "avx2") if level in available()]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in peer_level.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_torch_is_held(tmp_path: Path) -> None:
    for isa in HELD:
        with TransformersPeer(isa=isa) as peer:
            peer.load(SHAPES["nano"], 0, tmp_path, 1)
            assert f"torch's kernels {isa.upper()}" in peer.settings and "AMX unused" in peer.settings
            assert all(f"{name}={value}" in peer.settings for name, value in peer_level.LEVELS[isa].items())
            peer.decode([1] * 300, [2, 3])
            assert peer.logits([1, 2, 3]).shape == (SHAPES["nano"].vocab,)


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"])
def test_a_name_that_a_library_does_not_know_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries ignore such a name without a word and take all that there is; that is told."""
    for isa in HELD[1:]:  # avx2, where there is more
        monkeypatch.setitem(peer_level.LEVELS, isa, peer_level.LEVELS[isa] | {name: "next_years"})
        with TransformersPeer(isa=isa) as peer, pytest.raises(PeerError, match=f"{name} was not taken"):
            peer.load(SHAPES["nano"], 0, tmp_path, 1)


def test_the_users_own_limit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with TransformersPeer() as peer:
        peer.load(SHAPES["nano"], 0, tmp_path, 1)
        assert "oneDNN Intel AVX2," in peer.settings and "(ONEDNN_MAX_CPU_ISA=AVX2)" in peer.settings
