"""The embedded model, its card and the texts are what they say."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

DOMAINS = ("novel", "play", "python", "dict", "math")
SCRIPTS = Path("data/scripts/tiny_moe")


def test_card_has_the_hashes_of_the_files(top: Path) -> None:
    card = (top / "data/tiny-moe/CARD.md").read_text()
    stated = dict(re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|$", card, re.MULTILINE))
    files = {p.name for p in (top / "data/tiny-moe").iterdir() if p.suffix in (".json", ".safetensors")}
    assert set(stated) == files
    for name, digest in stated.items():
        assert hashlib.sha256((top / "data/tiny-moe" / name).read_bytes()).hexdigest() == digest, name


def test_model_is_small_enough_to_commit(top: Path) -> None:
    assert sum(p.stat().st_size for p in (top / "data/tiny-moe").iterdir()) <= 20e6
    assert sum(p.stat().st_size for p in (top / "data/validation").iterdir()) <= 300e3
    assert not list((top / "data").rglob("*.colibri"))


def test_header_agrees_with_config(top: Path) -> None:
    config = json.loads((top / "data/tiny-moe/config.json").read_text())
    with (top / "data/tiny-moe/model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    experts = {n for n in header if ".experts." in n}
    assert len(experts) == config["num_hidden_layers"] * config["num_local_experts"] * 3
    assert {v["dtype"] for k, v in header.items() if k != "__metadata__"} == {"F16"}


@pytest.mark.parametrize("domain", DOMAINS)
def test_validation_texts(top: Path, domain: str) -> None:
    text = (top / "data/validation" / f"{domain}.txt").read_text("utf8")
    documents = [part for part in text.split("\f") if part.strip()]
    assert len(documents) >= 10
    assert text.isascii()


@pytest.mark.parametrize("word", ["Austen", "Shakespeare", "Python Software Foundation", "WordNet 3.0 Copyright 2006"])
def test_notice_keeps_what_licences_ask_for(top: Path, word: str) -> None:
    assert word in (top / "data/tiny-moe/NOTICE").read_text()


def test_sums_repeat_and_are_right(top: Path) -> None:
    program = "import sums; from random import Random; print('\\n'.join(sums.documents(40, Random(3))))"
    runs = {subprocess.check_output([sys.executable, "-c", program], cwd=top / SCRIPTS, text=True) for _ in range(2)}
    assert len(runs) == 1
    for a, sign, b, c in re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", runs.pop()):
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(c)


def test_documents_are_packed_and_cut_as_described(top: Path) -> None:
    program = """
import prep
from random import Random
assert prep.to_ascii("\\u201cna\\u00efve\\u201d \\u2013 \\u00e6") == '"naive" - ae'
packed = prep.pack(["word " * 20] * 50, "|", 300, 900, Random(0))
assert all(300 < len(p) <= 1000 for p in packed[:-1])
assert "|".join(packed) == "|".join(["word " * 20] * 50)
chunks = prep.code_chunks("import os\\n\\n\\n\\n# a comment\\ndef f(x):\\n    return x  # kept\\n" * 40, Random(0))
assert all("# a comment" not in c and "\\n\\n\\n" not in c for c in chunks) and chunks
vector = b"\\x00\\x04\\x00\\x09\\x00\\x00\\x00\\x03abc\\x00\\x04\\x00\\x09\\x00\\x00\\x00\\x02de"
assert prep.r_strings(vector) == ["abc", "de"]
"""
    subprocess.run([sys.executable, "-c", program], cwd=top / SCRIPTS, check=True)


@pytest.mark.parametrize("name", ["get_text", "prep", "tokenizer"])
def test_scripts_explain_themselves(top: Path, name: str) -> None:
    shown = subprocess.run(
        [sys.executable, f"{name}.py", "--help"], cwd=top / SCRIPTS, capture_output=True, text=True, check=True
    ).stdout
    assert "--work" in shown
    assert f"data/scripts/tiny_moe/{name}.py" in shown
