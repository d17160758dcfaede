"""A wheel stands alone: built, installed into an empty environment, run in an empty folder."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

PROGRAM = """
import json, sys
import colibri_lab
from colibri_lab.paths import embedded_model, kernels_dir
with colibri_lab.Engine.load(embedded_model(), threads=1) as engine:
    tokens = list(engine.generate("Emma was", max_tokens=8))
    facts = engine.describe()
print(json.dumps({
    "package": colibri_lab.__file__, "model": str(embedded_model()), "kernels": str(kernels_dir()),
    "tokens": [token.id for token in tokens], "text": "".join(token.text for token in tokens),
    "backend": facts["backend"],
}))
"""


@pytest.fixture(scope="module")
def wheel(top: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(top)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel; its dependencies are borrowed from ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    with zipfile.ZipFile(wheel) as packed:  # what pip does with a wheel of pure Python
        packed.extractall(site)
    borrowed = Path(sysconfig.get_paths()["purelib"])
    # no line of ours may name the checkout: links, not a .pth file, since ours would be read too
    for path in borrowed.iterdir():
        if path.suffix != ".pth" and not path.name.startswith("colibri_lab") and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return python


def test_wheel_carries_kernels_model_and_notices(wheel: Path, top: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    for source, place in (("kernels", "_kernels"), ("data/tiny-moe", "_data/tiny-moe")):
        for path in (top / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"colibri_lab/{place}/{path.relative_to(top / source)}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith(".js") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "notebooks/")) or name.endswith(".colibri")]


def test_wheel_generates_in_an_empty_folder(installed: Path, top: Path, tmp_path: Path) -> None:
    empty = tmp_path / "an empty folder"
    empty.mkdir()
    environment = {"COLIBRI_CACHE": str(tmp_path / "cache"), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(empty)}
    ran = subprocess.run(
        [installed, "-I", "-c", PROGRAM], cwd=empty, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert len(said["tokens"]) == 8
    assert said["text"].strip()
    assert said["backend"] == "cpu"
    for place in ("package", "model", "kernels"):
        assert str(top) not in said[place]
        assert said[place].startswith(str(installed.parents[1]))
    assert not list(empty.iterdir()), "nothing is written where one happens to be"
