"""environment.yml, pyproject.toml and constraints.txt say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

# what conda-forge calls it; None: only one of the two has it
CONDA_NAMES: dict[str, str] = {
    "build": "python-build",
    "cupy-cuda13x": "cupy",
    "nvidia-cuda-nvdisasm": "cuda-nvdisasm",
    "nvidia-cuda-nvrtc": "cuda-nvrtc",
    "playwright": "playwright-python",
}
CONDA_ONLY = {"python", "pip", "c-compiler", "make"}
SHARED_EXTRAS = ("cuda", "test")  # the others are large and wanted by few


def project(top: Path) -> dict[str, list[Requirement]]:
    """Requirements by extra; the plain dependencies under the empty name."""
    table = tomllib.loads((top / "pyproject.toml").read_text())["project"]
    groups = {"": table["dependencies"], **table["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def conda(top: Path) -> dict[str, SpecifierSet]:
    lines = yaml.safe_load((top / "environment.yml").read_text())["dependencies"]
    found = {}
    for line in lines:
        name, _, version = line.partition(" ")
        assert name not in found, f"{name} is named twice"
        exact = re.fullmatch(r"[0-9.]+\*", version)
        found[name] = SpecifierSet(f"=={version}" if exact else version)
    return found


def test_conda_has_the_same_packages_and_bounds(top: Path) -> None:
    ours, theirs = project(top), conda(top)
    wanted = [r for extra in ("", *SHARED_EXTRAS) for r in ours[extra]]
    names = {}
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        name = CONDA_NAMES.get(name, name)
        assert name in theirs, f"environment.yml lacks {name}"
        assert theirs[name] == requirement.specifier, f"{name}: {theirs[name]} against {requirement.specifier}"
        names[name] = requirement
    assert set(theirs) - set(names) == CONDA_ONLY


def test_the_comparison_sees_a_difference(tmp_path: Path, top: Path) -> None:
    for name in ("pyproject.toml", "environment.yml"):
        (tmp_path / name).write_text((top / name).read_text().replace("  - numpy >=2.3", "  - numpy >=2.2"))
    with pytest.raises(AssertionError, match="numpy"):
        test_conda_has_the_same_packages_and_bounds(tmp_path)


def test_python_is_the_same(top: Path) -> None:
    table = tomllib.loads((top / "pyproject.toml").read_text())
    assert conda(top)["python"] == SpecifierSet(table["project"]["requires-python"])
    least = next(s.version for s in SpecifierSet(table["project"]["requires-python"]) if s.operator == ">=")
    assert table["tool"]["mypy"]["python_version"] == least
    assert table["tool"]["ruff"]["target-version"] == f"py{least.replace('.', '')}"


def test_the_lock_satisfies_the_bounds(top: Path) -> None:
    lock = top / "constraints.txt"
    rows = re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", lock.read_text(), re.MULTILINE)
    locked = {canonicalize_name(name): version for name, version in rows}
    body = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert len(body) == 2 * len(locked), "every line is a pinned package with one hash, nothing else"
    for extra in ("", "test"):
        for requirement in project(top)[extra]:
            version = locked.get(canonicalize_name(requirement.name))
            assert version, f"constraints.txt lacks {requirement.name}: run make lock"
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement} against {version}"


def test_extras_for_few_are_apart(top: Path) -> None:
    extras = project(top)
    assert {"cuda", "nvml", "parquet", "voila", "test", "oracle", "peers"} == set(extras) - {""}
    heavy = {"torch", "transformers", "llama-cpp-python", "gguf", "cupy-cuda13x"}
    assert not heavy & {r.name for r in extras[""] + extras["test"]}
