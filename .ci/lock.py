"""Locks the environment: names, versions and hashes of everything that `.[test]` brings, into constraints.txt.

    python .ci/lock.py --write            resolve pyproject.toml's bounds and write constraints.txt
    python .ci/lock.py --extra oracle     print the requirements of one extra, one a line

The lock holds for CPython 3.11 on Linux x86-64 with glibc; elsewhere the Makefile lets pyproject's bounds decide.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
HEAD = """\
# Written by `make lock` from pyproject.toml (dependencies and the extra `test`); not edited by hand.
# CPython 3.11, Linux x86-64. Use: pip install --require-hashes -r constraints.txt
"""


def project() -> dict[str, list[str]]:
    """Requirements by extra; the plain dependencies are under the empty name."""
    table = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def resolve(requirements: list[str]) -> list[tuple[str, str, str]]:
    """(name, version, sha256) of what pip would install into an empty environment, sorted by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *requirements], check=True)
        items = json.loads(report.read_text())["install"]
    found = [(i["metadata"], i["download_info"]["archive_info"]["hashes"]["sha256"]) for i in items]
    return sorted((meta["name"].lower().replace("_", "-"), meta["version"], digest) for meta, digest in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write constraints.txt")
    parser.add_argument("--extra", metavar="NAME", help="print the requirements of an extra")
    chosen = parser.parse_args()
    wanted = project()
    if chosen.extra:
        print("\n".join(wanted[chosen.extra]))
    if chosen.write:
        rows = resolve(wanted[""] + wanted["test"])
        lines = [f"{name}=={version} \\\n    --hash=sha256:{digest}" for name, version, digest in rows]
        (TOP / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n")
        print(f"constraints.txt: {len(rows)} packages")


if __name__ == "__main__":
    main()
