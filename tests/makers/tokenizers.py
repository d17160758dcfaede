"""Tiny byte-level tokenizer.json files, written by hand."""

from __future__ import annotations

from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")
FIRST = " etaoinshrdlucmfwypvbgkjqxz.,ETAOINSHRDLU0123456789'\n-?!:;()"  # what a small vocabulary holds first


def byte_map() -> dict[int, str]:
    """Byte -> printable character of byte-level BPE: printable Latin-1 stays, the rest moves to U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(moved)}}


def byte_tokenizer(
    vocab_size: int = 259, merges: tuple[str, ...] = (), bos: bool = True, added: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    """A BPE over bytes: ids 0-2 are <unk> <s> </s>, then bytes (common letters first), then `merges` ("a b") in order.

    A vocabulary under 259 holds only some bytes; the others become <unk>.
    """
    chars = byte_map()
    order = [ord(c) for c in FIRST] + [b for b in range(256) if b not in {ord(c) for c in FIRST}]
    pieces = [*SPECIAL, *(chars[b] for b in order)][: vocab_size - len(merges)]
    pieces += [merge.replace(" ", "") for merge in merges]
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] if bos else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": s, **token} for i, s in enumerate(SPECIAL)] + list(added),
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": list(merges),
        },
    }
