"""Small tokenizer.json texts of every kind of decoder."""

from __future__ import annotations

import json
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.makers import byte_tokenizer

BYTES = [f"<0x{b:02X}>" for b in range(256)]
TEXT = "the quick brown fox jumps over the lazy dog\nfoo bar 12 héé ☺ naïve {x} "


def text_of(fast: tokenizers.Tokenizer) -> str:
    return str(fast.to_str())


def byte_level() -> str:
    return json.dumps(byte_tokenizer(400, ("t h", "th e", "Ġ the", "Ġ f", "o o", "Ã ©", "Ġ Ġ")))


def llama(strip: bool = True) -> str:
    """As SentencePiece models are converted.

    Blanks as "▁", unknown characters as bytes, one leading blank taken off.
    """
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *BYTES,
        "▁",
        "foo",
        "▁bar",
        "bar",
        "{",
        "▁foo",
        "é",
        "▁▁",
        "x",
        "▁é",
        "😀",
        "\ufffd",
    ]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", False)
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return text_of(fast)


def metaspace() -> str:
    fast = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁a", -3.0), ("b", -3.0), ("▁▁", -4.0)], 0)
    )
    fast.decoder = decoders.Metaspace()
    fast.add_special_tokens(["<s>"])
    return text_of(fast)


def wordpiece() -> str:
    pieces = ["[UNK]", "foo", "##bar", ".", "n't", "##s", "do", "bar", ",", "'"]
    fast = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    return text_of(fast)


def suffixes() -> str:
    pieces = ["a", "b</w>", "c", "é</w>"]
    fast = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    fast.decoder = decoders.BPEDecoder()
    return text_of(fast)


MAKERS: dict[str, Callable[[], str]] = {
    "byte level": byte_level,
    "llama": llama,
    "llama, no strip": lambda: llama(strip=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "suffixes": suffixes,
}
