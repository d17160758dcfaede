"""A8, B10: where a text ends and what is shown of it, on every way in. Greedy text is forced by one-hot weights."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.cli import main
from colibri_lab.convert import convert
from colibri_lab.engine.engine import Engine
from tests.makers import Checkpoint, chain
from tests.makers.tokenizers import byte_tokenizer

MERGES = ("a b", "c d", "e f", "x y")
VOCAB = 259 + len(MERGES)
IDS: dict[str, int] = byte_tokenizer(VOCAB, MERGES)["model"]["vocab"]
START = "x"


def spelling(pieces: list[str], end: int | None = None) -> dict[int, int]:
    """Each piece follows the one before it, from START on; then `end`, or the last piece for ever."""
    ids = [IDS[START], *(IDS[piece] for piece in pieces)]
    assert len(set(ids)) == len(ids)
    return {**dict(pairwise(ids)), ids[-1]: ids[-1] if end is None else end}


def save(made: Checkpoint, at: Path) -> Path:
    source = made.with_tokenizer(merges=MERGES).save(at / "hf")
    return convert(source, at / "out", quantize="fp32")


def shown(path: Path, **how: Any) -> tuple[str, str | None, list[str]]:
    """(streamed text, finish reason, pieces) of a greedy run from START."""
    with Engine.load(path, threads=1) as engine:
        tokens = list(engine.generate(START, max_tokens=how.pop("max_tokens", 12), **how))
        return "".join(t.text for t in tokens), tokens[-1].finish_reason, [t.text for t in tokens]


# --- A8

ENDS = [
    (IDS["g"], {"eos_token_id": [IDS["g"], IDS["cd"]]}),
    (IDS["g"], {"eos_token_id": IDS["cd"]}),
    (IDS["cd"], {"eos_token_id": IDS["g"]}),
    ([IDS["g"], IDS["cd"]], {"eos_token_id": None}),
    ([IDS["g"], IDS["cd"]], {}),
    (IDS["cd"], None),
    (None, {"eos_token_id": [IDS["cd"]]}),
]


@pytest.mark.parametrize(("config", "generation"), ENDS)
def test_a8_any_end_token_ends_and_is_not_shown(config: Any, generation: Any, tmp_path: Path) -> None:
    """x, ab, cd: ends at cd whichever file says so. generation None: there is no generation_config.json."""
    made = chain(spelling(["ab", "cd", "ef", "g"]), VOCAB, eos_token_id=config)
    made.generation = generation
    text, reason, pieces = shown(save(made, tmp_path))
    assert (text, reason, pieces) == ("ab", "stop", ["ab", ""])


def test_a8_without_an_end_token_the_limit_ends(tmp_path: Path) -> None:
    text, reason, _ = shown(
        save(chain(spelling(["ab", "cd", "ef", "g"]), VOCAB, eos_token_id=None), tmp_path), max_tokens=6
    )
    assert (text, reason) == ("abcdefggg", "length")


def test_a8_alike_in_library_session_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = chain(spelling(["ab", "cd", "ef", "g"]), VOCAB, eos_token_id=IDS["g"])
    made.generation = {"eos_token_id": [IDS["g"], IDS["ef"]]}
    path = save(made, tmp_path)
    assert shown(path)[:2] == ("abcd", "stop")
    with Engine.load(path, threads=1) as engine:
        session = engine.session()
        session.start(START, max_tokens=12)
        assert session.join(20) and session.error is None
        assert session.text == "abcd" and session.tokens[-1].finish_reason == "stop"
    line = ["generate", "--model", str(path), "--prompt", START, "--max-tokens", "12", "--set", "threads=1"]
    assert main([*line, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["text"], said["tokens"]) == ("abcd", 3)
    assert main(line) == 0
    assert capsys.readouterr().out == "abcd\n"


# --- B10


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("cde", "ab", "stop"),  # over two tokens: nothing of "cd" is shown
        ("cdZ", "abcdefg", "stop"),  # never completes: what was held back comes out
        (["ef", "bcd"], "a", "stop"),  # overlapping: the one that is complete first
        (["de", "cdef"], "abc", "stop"),
        ("e", "abcd", "stop"),  # inside one token: what is before it in the token is shown
        ("f", "abcde", "stop"),
        ("gZ", "abcdefg", "stop"),  # held back when the end token comes
        ("abcdefg", "", "stop"),
    ],
)
def test_b10_stop_texts(stop: Any, text: str, reason: str, tmp_path: Path) -> None:
    """ab cd ef g, then the end token."""
    path = save(chain(spelling(["ab", "cd", "ef", "g"], end=2), VOCAB, eos_token_id=2), tmp_path)
    assert shown(path, stop=stop)[:2] == (text, reason)


def test_b10_right_after_a_held_back_text_the_end_token(tmp_path: Path) -> None:
    """stop "cdZ", the end token right after "cd": "cd" is ordinary text after all."""
    path = save(chain(spelling(["ab", "cd"], end=2), VOCAB, eos_token_id=2), tmp_path)
    text, reason, pieces = shown(path, stop="cdZ")
    assert (text, reason) == ("abcd", "stop") and pieces[0] == "ab" and pieces[1] == ""


def test_b10_a_character_over_two_tokens(tmp_path: Path) -> None:
    """The two bytes of "é" are two tokens: never half shown, and a stop text made of it is found."""
    path = save(chain(spelling(["ab", "Ã", "©", "ef"], end=2), VOCAB, eos_token_id=2), tmp_path)
    assert shown(path)[0] == "abéef" and shown(path)[2][1] == ""
    assert shown(path, stop="é")[:2] == ("ab", "stop")
    assert shown(path, stop="bé")[:2] == ("a", "stop")
    assert shown(path, stop="éZ")[0] == "abéef"
    cut = shown(path, max_tokens=2)
    assert cut[0].startswith("ab") and "Ã" not in cut[0]


def test_b10_stream_equals_one_shot(tmp_path: Path) -> None:
    """However the text is cut into tokens, the joined stream is the text cut at the stop."""
    for i, pieces in enumerate(
        (["ab", "cd", "ef", "g"], ["a", "b", "c", "d", "ef", "g"], ["ab", "c", "d", "e", "f", "g"])
    ):
        path = save(chain(spelling(pieces, end=2), VOCAB, eos_token_id=2), tmp_path / str(i))
        for stop in ("cde", "bc", "g", "defg", "efgh"):
            text = shown(path, stop=stop)[0]
            assert text == "abcdefg".split(stop)[0]
