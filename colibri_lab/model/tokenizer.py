"""Text to token ids and back; streamed text that joins to exactly what decoding everything at once gives.

tokenizer.json goes through the `tokenizers` library, a lone tokenizer.model through `sentencepiece`; a folder with
neither gets `IdsTokenizer`. Special tokens are not shown in decoded text. Chat templates are not applied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .errors import ModelError
from .jsonfile import check_present, parse_object, read_bytes, read_object

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LARGEST = 256 << 20
UNKNOWN = "\ufffd"  # what decoders put where bytes are no whole character (yet)


class Tokenizer:
    """What all tokenizers do. Ids that a tokenizer does not know (a model's padded vocabulary) decode to nothing."""

    kind = ""
    bos: int | None = None
    eos: tuple[int, ...] = ()
    vocab_size = 0
    byte_ids: frozenset[int] = (
        frozenset()
    )  # ids of single bytes, whose text is known only when the bytes after them are

    @staticmethod
    def open(folder: Path | str) -> Tokenizer:
        """The tokenizer of a model folder (or of a tokenizer.json / tokenizer.model file).

        ModelError when it is damaged.
        """
        path = Path(folder)
        if path.is_file():
            folder, candidates = path.parent, [path]
        else:
            folder, candidates = path, [path / "tokenizer.json", path / "tokenizer.model"]
        config_path = folder / "tokenizer_config.json"
        config = read_object(config_path) if os.path.lexists(config_path) else {}
        for candidate in candidates:
            if os.path.lexists(candidate):
                return _open(candidate, config)
        return IdsTokenizer()

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the start token if this tokenizer adds one; never two of them."""
        raise ModelError("this tokenizer cannot encode")

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        raise ModelError("this tokenizer cannot decode")

    def stream(self, prompt_ids: Sequence[int]) -> Stream:
        """Text of new tokens after a prompt, piece by piece."""
        return Stream(self, prompt_ids)


class Stream:
    """decode(prompt) + all that push and flush return == decode(prompt + pushed), and no character is ever cut.

    Decoding is not piecewise (leading spaces, characters of several tokens), so a window of recent ids is decoded
    with and without the new one. The window begins where text was whole, and holds visible text before the new token,
    since decoders treat the first token apart.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer, self._bytes = tokenizer, tokenizer.byte_ids
        self._ids = [int(token) for token in prompt_ids]
        self._start = 0  # first id of the window
        self._whole = len(self._ids)  # ids before this one are shown in full
        self._held = False  # a run of single bytes is open; tokens that show nothing do not end it
        self._shown = len(tokenizer.decode(self._ids).rstrip(UNKNOWN))  # characters of the window that were shown
        for back in range(8, 25, 4):  # usually the first will do
            if self._start == 0 and self._whole > back:
                self._narrow(self._whole - back)

    def push(self, token: int) -> str:
        """Text that became certain with this token; "" while a character is incomplete."""
        self._ids.append(int(token))
        self._held = self._ids[-1] in self._bytes or (self._held and self._hidden(self._ids[-1]))
        if self._held:
            return ""
        text = self._tokenizer.decode(self._ids[self._start :])
        certain = len(text) - text.endswith(UNKNOWN)
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if certain == len(text):
            start, self._whole = self._whole, len(self._ids)
            self._narrow(start)
        return new

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        text = self._tokenizer.decode(self._ids[self._start :])
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _narrow(self, start: int) -> None:
        """Let the window begin at id `start` or a little before, if that leaves visible, whole text in it."""
        while (
            self._bytes and start > self._start and (self._ids[start] in self._bytes or self._hidden(self._ids[start]))
        ):
            start -= 1  # never cut a run of bytes
        if start <= self._start:
            return
        text = self._tokenizer.decode(self._ids[start:])
        if text and not text.startswith(UNKNOWN) and not text.endswith(UNKNOWN):
            self._start, self._shown = start, len(text)

    def _hidden(self, token: int) -> bool:
        return not self._tokenizer.decode([token])


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. Its own post-processor says whether a start token is added."""

    kind = "tokenizers"

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        from tokenizers import Tokenizer as Fast

        data = read_bytes(path, _LARGEST)
        layout = parse_object(data, str(path))
        try:
            self._fast = Fast.from_str(data.decode("utf-8-sig"))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path}: no tokenizer the tokenizers library can read ({str(error)[:160]})") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)
        self.bos, self.eos = _special(config, "bos_token", self._fast.token_to_id), ()
        if (eos := _special(config, "eos_token", self._fast.token_to_id)) is not None:
            self.eos = (eos,)
        if self.bos is None:  # no tokenizer_config.json: the one that the post-processor puts in front of nothing
            added = self._fast.encode("").ids
            self.bos = added[0] if added else None
        decoder = str(layout.get("decoder"))
        self.byte_ids = self._byte_pieces() if "ByteFallback" in decoder else frozenset()
        self._literal = self._literal_tokens() if "ByteLevel" in decoder else {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = list(self._fast.encode(_whole(text)).ids)
        if len(ids) > 1 and ids[0] == ids[1] == self.bos and self._fast.encode("").ids[:1] == [self.bos]:
            return ids[1:]  # the text itself begins with the start token
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= i < 1 << 31]
        if self._literal.keys().isdisjoint(known):
            return str(self._fast.decode(known, skip_special_tokens=True))
        text, first = [], 0
        for at, token in enumerate([*known, None]):
            if token is None or token in self._literal:
                text.append(str(self._fast.decode(known[first:at], skip_special_tokens=True)))
                text.append(self._literal.get(token, "") if token is not None else "")
                first = at + 1
        return "".join(text)

    def _literal_tokens(self) -> dict[int, str]:
        """Added tokens whose text a byte-level decoder takes for bytes and damages, such as "ilÖveyou"."""
        added = self._fast.get_added_tokens_decoder()
        plain = {token: entry.content for token, entry in added.items() if not entry.special}
        return {t: text for t, text in plain.items() if not text.isascii() and all(map(_is_byte_letter, text))}

    def _byte_pieces(self) -> frozenset[int]:
        return frozenset(
            i for piece, i in self._fast.get_vocab(with_added_tokens=True).items() if _BYTE.fullmatch(piece)
        )


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer.model without tokenizer.json.

    A start token is added unless tokenizer_config.json says add_bos_token: false.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        from sentencepiece import SentencePieceProcessor

        data = read_bytes(path, _LARGEST)
        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
            self.vocab_size = self._model.GetPieceSize()
        except Exception as error:  # the library raises RuntimeError of many kinds
            raise ModelError(f"{path}: no model the sentencepiece library can read ({str(error)[:160]})") from error
        if self.vocab_size < 1:
            raise ModelError(f"{path}: no model the sentencepiece library can read (no pieces)")
        bos, eos = self._model.bos_id(), self._model.eos_id()
        self.bos, self.eos = bos if bos >= 0 else None, (eos,) if eos >= 0 else ()
        self._add_bos = config.get("add_bos_token") is not False and self.bos is not None
        self.byte_ids = frozenset(i for i in range(self.vocab_size) if self._model.IsByte(i))
        self._hidden = frozenset(i for i in range(self.vocab_size) if self._model.IsControl(i))

    def encode(self, text: str) -> list[int]:
        ids = [int(i) for i in self._model.EncodeAsIds(_whole(text))]
        if self._add_bos and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= i < self.vocab_size and i not in self._hidden]
        return str(self._model.DecodeIds(known)) if known else ""


class IdsTokenizer(Tokenizer):
    """No tokenizer at all: ids in, "<id>" out."""

    kind = "ids"

    def encode(self, text: str) -> list[int]:
        raise RequestError(
            "the model folder has neither tokenizer.json nor tokenizer.model: pass token ids instead of text"
        )

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{int(token)}>" for token in ids)


def _open(path: Path, config: dict[str, Any]) -> Tokenizer:
    check_present(path)
    return JsonTokenizer(path, config) if path.suffix == ".json" else SentencePieceTokenizer(path, config)


def _whole(text: str) -> str:
    """`text` if it can be written as UTF-8, which Python's strings need not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is no Unicode text (lone surrogate at character {error.start})") from error
    return text


def _is_byte_letter(letter: str) -> bool:
    """Does byte-level BPE use this character to write a byte?"""
    code = ord(letter)
    return 0x21 <= code <= 0x7E or 0xA1 <= code <= 0xAC or 0xAE <= code <= 0x143


def _special(config: dict[str, Any], key: str, find: Callable[[str], int | None]) -> int | None:
    """Id of a special token that tokenizer_config.json names, as text or as an object with its content."""
    named = config.get(key)
    text = named.get("content") if isinstance(named, dict) else named
    return find(text) if isinstance(text, str) else None
