"""House rules that a machine can check: files, links, paths, sizes, the Makefile."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP_FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    "environment.yml",
    "constraints.txt",
    ".ci/run",
    ".pre-commit-config.yaml",
    "data/tiny-moe/CARD.md",
    "data/tiny-moe/NOTICE",
    "docs/format.md",
    "docs/policies.md",
)
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".js", ".c", ".h", ".cu", ".cuh", ".ipynb", ".json", ".cfg", ""}
NOT_OURS = {"build", "dist", "__pycache__", "training", "node_modules"}
HIDDEN = {".ci", ".pre-commit-config.yaml", ".gitignore"}  # other hidden folders are caches and the environment
MOST_LINES = 300


def files(top: Path) -> Iterator[Path]:
    """The project's own text files."""
    for path in sorted(top.rglob("*")):
        parts = path.relative_to(top).parts
        hidden = parts[0].startswith(".") and parts[0] not in HIDDEN
        if not hidden and not NOT_OURS & set(parts) and path.is_file() and path.suffix in TEXT:
            yield path


@pytest.mark.parametrize("name", TOP_FILES)
def test_top_level_has(top: Path, name: str) -> None:
    assert (top / name).stat().st_size > 100


def test_no_paths_of_a_machine(top: Path) -> None:
    private = re.compile(r"(?<![\w.])/(" + "|".join(("work", "farm", "tmp", "home", "root", "opt")) + r")/[a-z]")
    found = [
        f"{path.relative_to(top)}:{number}: {line.strip()[:100]}"
        for path in files(top)
        for number, line in enumerate(path.read_text("utf8", "replace").splitlines(), 1)
        if len(line) < 2000 and private.search(line)
    ]
    assert not found, "\n".join(found)


def test_package_files_are_short(top: Path) -> None:
    for folder in ("colibri_lab", "data/scripts", ".ci"):
        for path in (top / folder).rglob("*"):
            if path.suffix in (".py", ".js"):
                lines = len(path.read_text("utf8").splitlines())
                assert lines <= MOST_LINES, f"{path.relative_to(top)} has {lines} lines"


def test_no_stubs_and_no_swallowed_errors(top: Path) -> None:
    words = ("NotImplemented" + "Error", "TO" + "DO", "FIX" + "ME", "pytest." + "skip(", "mark." + "skip", "x" + "fail")
    swallowed = re.compile(r"except( Exception)?: *pass")
    for path in files(top):
        if path.suffix == ".py":
            text = path.read_text("utf8")
            assert not swallowed.search(text), path
            for word in words:
                assert word not in text, f"{path.relative_to(top)} has {word}"


def test_nothing_comes_from_the_network(top: Path) -> None:
    hosts = ("cdn" + ".", "unp" + "kg", "jsde" + "livr", "notebook_" + "connected")
    for path in files(top):
        if path.relative_to(top).parts[0] in ("colibri_lab", "notebooks"):
            text = path.read_text("utf8", "replace")
            assert not [host for host in hosts if host in text], path


def test_links_resolve(top: Path) -> None:
    """Every relative link of the documents leads to a file, and every anchor of the same project to a heading."""
    books = [*(top / "notebooks").glob("*.md"), *(top / "notebooks").glob("*.ipynb")]
    for page in [*top.glob("*.md"), *(top / "docs").rglob("*.md"), *(top / "data").rglob("*.md"), *books]:
        text = re.sub(r"```.*?```", "", page.read_text("utf8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists(), f"{page.relative_to(top)}: {target}"
            if anchor and there.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", there.read_text("utf8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
                assert anchor in slugs, f"{page.relative_to(top)}: {target}"


def test_a_tokens_path_names_what_exists(top: Path) -> None:
    """README's ten links each name what stands in the file they lead to, and a notebook follows the same ten."""
    section = (top / "README.md").read_text("utf8").split("## A token's path")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. \[`([\w.]+)`\]\(([^)]+)\)", section, re.MULTILINE)
    assert len(steps) == 10
    followed = (top / "notebooks" / "10_follow_one_token.ipynb").read_text("utf8")
    assert re.findall(r"\d+\. \[`([\w.]+)`\]\(\.\./([^)]+)\)", followed) == steps
    for name, target in steps:
        last = name.rsplit(".", 1)[-1]
        text = (top / target).read_text("utf8")
        assert re.search(rf"(def|class|void|int|EXPORT\b.*) \*?{re.escape(last)}\b", text), f"{target} has no {name}"


@pytest.mark.parametrize(
    "target", ["lab", "demo", "test", "test-oracle", "lint", "bench", "soak", "help", "lock", "clean"]
)
def test_make_has(top: Path, target: str) -> None:
    assert re.search(rf"^{target}:", (top / "Makefile").read_text(), re.MULTILINE)


def test_make_help_lists_its_targets(top: Path) -> None:
    shown = subprocess.run(["make", "help"], cwd=top, capture_output=True, text=True, check=True).stdout
    for target in ("lab", "demo", "test", "test-oracle"):
        assert re.search(rf"^  make {target} +\w", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("goal", "hidden", "said"),
    [
        ("tools", "cc gcc clang", "build-essential"),
        ("browser", "chromium chromium-browser google-chrome", "package chromium"),
        ("arm", "aarch64-linux-gnu-gcc", "packages gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"),
        ("arm", "qemu-aarch64", "package qemu-user"),
    ],
)
def test_make_names_the_package_of_what_is_missing(
    top: Path, tmp_path: Path, goal: str, hidden: str, said: str
) -> None:
    """With a PATH that lacks it, make stops at once and says which Debian package brings it."""
    bare = tmp_path / "bin"
    bare.mkdir()
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if path.name not in hidden.split() and not (bare / path.name).exists():
                (bare / path.name).symlink_to(path)
    python = shutil.which("python3") or "python3"
    ran = subprocess.run(
        ["make", goal, f"PYTHON={python}"], cwd=top, env={"PATH": str(bare)}, capture_output=True, text=True
    )
    assert ran.returncode != 0
    assert said in ran.stderr
