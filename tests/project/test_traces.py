"""The recorded runs of notebook 08 are what their card says, and come out the same when they are made again."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from colibri_lab.telemetry import ReplaySource, replay

SCRIPT = Path("data/scripts/traces/record.py")
NAMES = ["run_a.jsonl", "run_b.jsonl", "run_c.jsonl"]


def whole(path: Path) -> tuple[ReplaySource, object]:
    source = replay(path)
    assert not source.trouble
    return source, source.read(source.cursor())


def test_the_card_has_their_hashes_and_they_are_small(top: Path) -> None:
    folder = top / "data/traces"
    stated = dict(re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|$", (folder / "CARD.md").read_text(), re.MULTILINE))
    assert sorted(stated) == sorted(path.name for path in folder.glob("*.jsonl")) == NAMES
    for name, digest in stated.items():
        data = (folder / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest and len(data) < 400_000, name
        assert not re.search(rb"/(home|root|tmp|work|opt)/", data)


def test_made_again_they_have_the_same_tokens_routes_and_counts(top: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, tmp_path], cwd=top, check=True, timeout=120)
    for name in NAMES:
        (committed, old), (_, new) = whole(top / "data/traces" / name), whole(tmp_path / name)
        for field in ("sequence", "position", "token", "phase", "rows", "faults", "hits", "evictions", "bytes_read"):
            np.testing.assert_array_equal(old.tokens[field], new.tokens[field], err_msg=f"{name}: {field}")
        np.testing.assert_array_equal(old.route, new.route)
        assert old.texts == new.texts and committed.engine["path"] == "tiny-moe/model.colibri"
