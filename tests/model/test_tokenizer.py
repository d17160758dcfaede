"""Tokenizers.

Streamed text joins to what decoding at once gives, the start token comes once, added tokens stay whole.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.errors import RequestError
from colibri_lab.model.errors import ModelError
from colibri_lab.model.tokenizer import IdsTokenizer, SentencePieceTokenizer, Tokenizer
from tests.makers import byte_tokenizer
from tests.model.tokenizer_makers import MAKERS, TEXT, byte_level, llama, text_of


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.model and nothing else."""
    import sentencepiece

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=trained,
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
        character_coverage=0.98,
        num_threads=1,
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    return folder


def opened(text: str, folder: Path, **config: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.open(folder)


def assert_streams(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    stream = tokenizer.stream(prompt)
    pieces = [stream.push(token) for token in ids]
    assert tokenizer.decode(prompt) + "".join(pieces) + stream.flush() == tokenizer.decode(prompt + ids)
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", [*MAKERS, "sentencepiece"])
def test_streams_join_to_the_whole(kind: str, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any ids at all, special tokens and broken characters among them, after a prompt that ends in a whole one."""
    folder = tmp_path_factory.mktemp("any")
    tokenizer = Tokenizer.open(sentences) if kind == "sentencepiece" else opened(MAKERS[kind](), folder)
    ids = st.integers(0, tokenizer.vocab_size + 2)
    if kind != "wordpiece":  # runs of single bytes are rare among random ids
        ids = ids | st.sampled_from(sorted(tokenizer.byte_ids) or [3])

    @settings(max_examples=200, deadline=None)
    @given(st.lists(ids, max_size=12), st.lists(ids, max_size=24))
    def check(prompt: list[int], more: list[int]) -> None:
        shown = [token for token in prompt if tokenizer.decode([token])]
        if not shown or (shown[-1] not in tokenizer.byte_ids and not tokenizer.decode(prompt).endswith("\ufffd")):
            assert_streams(tokenizer, prompt, more)

    check()


@pytest.mark.parametrize("kind", MAKERS)
def test_same_as_the_library(kind: str, tmp_path: Path) -> None:  # B7
    tokenizer = opened(MAKERS[kind](), tmp_path)
    library = tokenizers.Tokenizer.from_str(MAKERS[kind]())
    ids = list(range(library.get_vocab_size()))
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.encode("foo bar é") == library.encode("foo bar é").ids
    assert tokenizer.vocab_size == len(ids)


def test_leading_spaces(tmp_path: Path) -> None:  # B6
    tokenizer = opened(llama(), tmp_path)
    ids = {piece: token for token, piece in enumerate(["▁", "foo", "▁bar", "bar", "{"], 3 + 256)}
    for prompt, more, want in [
        (["foo"], ["▁bar", "▁", "▁", "{"], " bar  {"),
        (["foo"], ["bar"], "bar"),
        (["foo"], ["▁", "▁", "▁"], "   "),
        ([], ["▁bar", "▁bar"], "bar bar"),
        (["▁"], ["▁bar"], " bar"),
    ]:
        before = [ids[piece] for piece in prompt]
        stream = tokenizer.stream(before)
        assert "".join(stream.push(ids[piece]) for piece in more) + stream.flush() == want
        assert_streams(tokenizer, before, [ids[piece] for piece in more])
        assert_streams(tokenizer, [1, *before], [ids[more[0]], 2, *(ids[piece] for piece in more)])


def test_characters_are_never_cut(tmp_path: Path) -> None:
    tokenizer = opened(byte_level(), tmp_path)
    prompt = tokenizer.encode("the ")
    for text in ("é", "☺", "😀", "日本語"):
        ids = tokenizer.encode(text)[1:]
        assert len(ids) >= len(text) * 2 or text == "é"
        stream = tokenizer.stream(prompt)
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)
        cut = tokenizer.stream(prompt)
        shown = "".join(cut.push(token) for token in ids[:-1])
        assert shown == text[:-1]
        assert cut.flush() in ("\ufffd", "")
    llama_like = opened(llama(), tmp_path)
    stream = llama_like.stream([260])
    pieces = [stream.push(3 + b) for b in "☺".encode()] + [stream.push(261)]
    assert pieces == ["", "", "", "☺ bar"]


def test_added_tokens_stay_whole(tmp_path: Path) -> None:  # B7
    plain = {"single_word": False, "rstrip": False, "normalized": False, "special": False}
    layout = byte_tokenizer(259, added=({"id": 259, "content": "ilÖveyou", "lstrip": False, **plain},))
    layout["added_tokens"] += [{"id": 260, "content": "Ġé", "lstrip": True, **plain}]
    layout["added_tokens"] += [
        {"id": 3, "content": " ", "lstrip": False, **plain}
    ]  # an id of the base vocabulary again
    tokenizer = opened(json.dumps(layout), tmp_path)
    library = tokenizers.Tokenizer.from_str(json.dumps(layout))
    for text in ("a ilÖveyou b", "x  Ġé y", "ilÖveyouilÖveyou", "é☺"):
        ids = tokenizer.encode(text)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert_streams(tokenizer, ids[:1], ids[1:])
    assert library.decode(tokenizer.encode("ilÖveyou")) == "il\ufffdveyou", "when the library mends this, so can we"
    assert tokenizer.decode(tokenizer.encode("a b")) == library.decode(tokenizer.encode("a b")) == "a b"


def test_the_start_token_comes_once(tmp_path: Path) -> None:
    tokenizer = opened(byte_level(), tmp_path)
    assert tokenizer.bos == 1
    plain = tokenizer.encode("the")
    assert plain[0] == 1
    assert tokenizer.encode("<s>the") == plain
    assert tokenizer.encode("the<s>").count(1) == 2
    assert tokenizer.encode("") == [1]
    without = opened(json.dumps(byte_tokenizer(bos=False)), tmp_path)
    assert without.bos is None
    assert without.encode("") == []
    assert without.encode("<s>a")[0] == 1, "a start token that was asked for stays"


def test_special_tokens_from_the_config(tmp_path: Path) -> None:
    tokenizer = opened(byte_level(), tmp_path, bos_token={"content": "<s>"}, eos_token="</s>")
    assert (tokenizer.bos, tokenizer.eos) == (1, (2,))
    tokenizer = opened(byte_level(), tmp_path, bos_token=None, eos_token="nothing of the kind")
    assert (tokenizer.bos, tokenizer.eos) == (1, ())


def test_ids_that_no_tokenizer_knows(tmp_path: Path, sentences: Path) -> None:
    for tokenizer in (opened(byte_level(), tmp_path), Tokenizer.open(sentences)):
        assert tokenizer.decode([10**6, -1, 1 << 40]) == ""
        assert_streams(tokenizer, [10**6], [10**6, 30, 10**6])


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    fast = tokenizers.Tokenizer.from_str(byte_level())
    fast.enable_truncation(4)
    fast.enable_padding(length=50)
    tokenizer = opened(text_of(fast), tmp_path)
    assert len(tokenizer.encode("xyz" * 10)) == 31


def test_sentencepiece(sentences: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(sentences)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.bos, tokenizer.eos) == (1, (2,))
    ids = tokenizer.encode("the quick brown ☺ 語")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "the quick brown ☺ 語"
    assert_streams(tokenizer, ids[:4], ids[4:])
    (tmp_path / "tokenizer.model").write_bytes((sentences / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.open(tmp_path).encode("the") == ids[1:2]
    (tmp_path / "tokenizer.json").write_text(byte_level())
    assert Tokenizer.open(tmp_path).kind == "tokenizers", "tokenizer.json goes first"
    assert Tokenizer.open(tmp_path / "tokenizer.model").kind == "sentencepiece"


def test_no_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(tmp_path)
    assert isinstance(tokenizer, IdsTokenizer)
    assert tokenizer.decode([3, 14]) == "<3><14>"
    stream = tokenizer.stream([1])
    assert [stream.push(5), stream.push(6), stream.flush()] == ["<5>", "<6>", ""]
    with pytest.raises(RequestError, match="pass token ids instead of text"):
        tokenizer.encode("text")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("data", [b"", b"\x00\x01\x02", b"{}", b"[", b'{"version": "1.0", "model": {"type": "zzz"}}'])
def test_damaged_files(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelError, match=name) as caught:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_dangling_links(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("../blobs/abc")
    with pytest.raises(ModelError, match="the download is incomplete"):
        Tokenizer.open(tmp_path)


def test_lone_surrogates_are_refused(tmp_path: Path, sentences: Path) -> None:
    for tokenizer in (opened(byte_level(), tmp_path), Tokenizer.open(sentences)):
        with pytest.raises(RequestError, match="lone surrogate at character 1"):
            tokenizer.encode("a\ud800")


def test_long_streams_stay_cheap(tmp_path: Path) -> None:
    """The window does not grow: decoding is asked for a few ids at a time, even after a long prompt."""
    tokenizer = opened(byte_level(), tmp_path)
    longest = 0
    plain = tokenizer.decode

    def counted(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return plain(ids)

    stream = tokenizer.stream(tokenizer.encode("the fox " * 200))
    tokenizer.decode = counted  # type: ignore[method-assign]
    for token in tokenizer.encode("é the fo☺ " * 100)[1:]:
        stream.push(token)
    assert longest < 30
