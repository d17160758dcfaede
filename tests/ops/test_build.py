"""The kernel cache under bad conditions, the choice of level and of backend, the bandwidth probe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from colibri_lab.ops import build, gpu, isa, probe
from colibri_lab.ops.select import NoGpu, choose_backend

ROOT = Path(__file__).parents[2]
# Compiling takes seconds; a stand-in copies a library made before, so that the cache is tested and not gcc.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo stand-in 1; exit 0; fi
echo run >> "{log}"
while [ "$1" != -o ]; do shift; done
cp "{library}" "$2"
"""


class Cache:
    """A cache folder of its own, a stand-in compiler and a count of its runs."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.cc, self.log = folder / "stand-in", folder / "log"
        self.cc.write_text(STAND_IN.format(log=self.log, library=library))
        self.cc.chmod(0o755)
        self.log.touch()
        self.environment = {"CC": str(self.cc), "COLIBRI_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
        self.folder = folder / "cache" / "kernels"

    def compiles(self) -> int:
        return len(self.log.read_text().split())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    cache = Cache(tmp_path, Path(build.load("plain")._name))
    for name, value in cache.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return cache


@pytest.fixture
def load(cache, monkeypatch):
    """Load as a fresh process would: the path of the library."""

    monkeypatch.setattr(build, "_loaded", {})

    def fresh() -> Path:
        build.forget()
        return Path(build.load("plain")._name)

    return fresh


def test_compiled_once_and_again_when_damaged(cache, load):
    path = load()
    assert path.is_relative_to(cache.folder) and cache.compiles() == 1
    assert load() == path and cache.compiles() == 1
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", whole[:-1] + b"x"):
        path.unlink()  # a library in use must not change under its process
        path.write_bytes(damage)
        before = cache.compiles()
        assert load() == path and cache.compiles() == before + 1 and path.read_bytes() == whole
    (path.parent / build.DIGEST).unlink()
    assert load() == path and cache.compiles() == 5
    assert [p.name for p in cache.folder.iterdir()] == [path.parent.name]  # nothing half-made is left


def test_eight_processes_at_once(cache, tmp_path):
    program = "from colibri_lab.ops import build; print(build.load('plain')._name)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(8)]
    results = [process.communicate(timeout=120) for process in started]
    assert all(process.returncode == 0 for process in started), results
    assert len({out for out, _ in results}) == 1
    assert len(list(cache.folder.iterdir())) == 1


def test_cache_that_is_a_file(load, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="COLIBRI_CACHE") as caught:
        path = load()
    assert len(caught) == 1 and path.exists() and path.parent.parent.parent == tmp_path


def test_read_only_cache(cache, load, monkeypatch):
    """As a folder of mode 0500 does it, which does not stop root."""
    make = tempfile.mkdtemp

    def refuse(*args, **how):
        if str(how.get("dir", "")).startswith(str(cache.folder)):
            raise PermissionError(13, "Permission denied")
        return make(*args, **how)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied") as caught:
        path = load()
    assert len(caught) == 1 and not path.is_relative_to(cache.folder)


def test_what_others_may_write_is_not_loaded(cache, load):
    path = load()
    path.chmod(0o666)
    assert load() == path and cache.compiles() == 2 and not path.stat().st_mode & 0o022
    cache.folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="writable by others"):
        assert not load().is_relative_to(cache.folder)


def test_no_compiler_names_the_package(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.KernelError, match="gcc"):
        build.compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(build.KernelError, match="build-essential"):
        build.compiler()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(build.KernelError, match="xcode-select"):
        build.compiler()
    monkeypatch.setattr(build, "_loaded", {})
    backend, reason = choose_backend("auto", "exact")
    assert backend.name == "reference" and "xcode-select" in reason
    with pytest.raises(build.KernelError):
        choose_backend("cpu")


def test_compile_error_is_shown(monkeypatch, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "colibri.c").write_text("int broken(void) { return nothing; }")
    monkeypatch.setattr(build, "kernels_dir", lambda: tmp_path)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.KernelError, match="nothing"):
        build.load("plain")
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_levels(monkeypatch):
    assert isa.available()[-1] == "plain" and probe.isa_levels() == isa.available()
    monkeypatch.setenv("COLIBRI_ISA", "plain")
    assert isa.choose() == "plain" and choose_backend("cpu")[0].isa == "plain"
    assert isa.choose(isa.available()[0]) == isa.available()[0]
    monkeypatch.setenv("COLIBRI_ISA", "mmx")
    with pytest.raises(ValueError, match="mmx"):
        isa.choose()
    monkeypatch.setattr(isa, "available", lambda: ("plain",))
    with pytest.raises(ValueError, match="does not run avx2"):
        isa.choose("avx2")


X86_FLAGS = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "levels"),
    [
        ("x86_64", f"processor : 0\nflags\t: fpu {X86_FLAGS} ht\n", ("avx512", "avx2", "plain")),
        ("AMD64", "flags\t: avx2 fma f16c\n", ("avx2", "plain")),
        ("x86_64", "flags\t: fpu\n", ("plain",)),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd asimddp\n", ("dotprod", "neon", "plain")),  # RK3588, Orin
        ("aarch64", "Features\t: fp asimd crc32\n", ("neon", "plain")),  # a Cortex-A72
        ("riscv64", "isa\t: rv64imafdcv\n", ("plain",)),
    ],
)
def test_levels_of_a_processor(monkeypatch, tmp_path, machine, cpuinfo, levels):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(isa, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    assert isa.available.__wrapped__() == levels


@pytest.mark.parametrize("allowed", [True, False])
def test_amx_is_there_when_the_system_allows_it(monkeypatch, tmp_path, allowed):
    """Some virtual machines name it and refuse it."""
    (tmp_path / "cpuinfo").write_text(f"flags\t: {X86_FLAGS} amx_tile amx_int8\n")
    monkeypatch.setattr(isa, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "_tiles_allowed", lambda: allowed)
    assert isa.available.__wrapped__() == (*(["amx"] if allowed else []), "avx512", "avx2", "plain")


@pytest.mark.parametrize(
    ("machine", "said", "levels"),
    [
        ("arm64", "hw.optional.arm.FEAT_DotProd: 1\n", ("dotprod", "neon", "plain")),
        ("arm64", "hw.optional.arm.FEAT_DotProd: 0\n", ("neon", "plain")),
        ("x86_64", "machdep.cpu.features: FPU FMA F16C\nmachdep.cpu.leaf7_features: AVX2\n", ("avx2", "plain")),
    ],
)
def test_levels_on_macos(monkeypatch, tmp_path, machine, said, levels):
    monkeypatch.setattr(isa, "Path", lambda _: tmp_path / "there is no cpuinfo")
    monkeypatch.setattr(isa.platform, "machine", lambda: machine)
    monkeypatch.setattr(isa.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, stdout=said))
    assert isa.available.__wrapped__() == levels


def test_intrinsics_stay_in_their_levels_files():
    """No processor's header is included outside the files that are its own, and none of its types or functions used."""
    own = {"immintrin.h": "vec_avx512|vec_avx2|crc32_pclmul", "arm_neon.h": "vec_neon"}
    for path in sorted(build.source().parent.glob("*.[ch]")):
        text = path.read_text()
        for header, names in own.items():
            assert header not in text or re.fullmatch(rf"({names})\.h", path.name), path
        if not re.fullmatch(r"((vec|matmul)_(amx|avx512|avx2|neon)|crc32_pclmul)\.h", path.name):
            assert not re.search(r"\b(_mm\d*_\w+|__m\d+i?|v\w+q?_[fsu]\d+|(u?int|float)\d+x\d+_t)\b", text), path


def test_choose_backend():
    backend, reason = choose_backend("auto", "fast", 2)
    assert (backend.name, backend.precision, backend.threads) == ("cpu", "fast", 2) and backend.isa in reason
    assert choose_backend("reference", "exact")[0].name == "reference"
    assert gpu.trouble().says in reason
    with pytest.raises(NoGpu, match=f"backend: cuda: {gpu.trouble().says}; .*install"):
        choose_backend("cuda")
    with pytest.raises(ValueError, match="none of auto"):
        choose_backend("gpu")


def test_probe():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.1 < probe.read_bandwidth(1, mebibytes=16, passes=2) < 10_000
        assert 0.1 < probe.read_bandwidth(2, mebibytes=16, passes=2, by_cpu=False) < 10_000
        for streams in (1, 4):
            assert 0.1 < probe.read_bandwidth(1, mebibytes=16, passes=1, streams=streams) < 10_000
    with pytest.raises(ValueError, match="at least"):
        probe.read_bandwidth(0)
    with pytest.raises(ValueError, match="streams: 1, 4 or None for both in turn, not 2"):
        probe.read_bandwidth(1, streams=2)
