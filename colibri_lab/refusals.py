"""What to say of values that pydantic refuses: one line, which names the key."""

from __future__ import annotations

import reprlib

from pydantic import ValidationError
from pydantic_core import ErrorDetails


def in_words(error: ValidationError) -> str:
    """All keys that are wrong, each once."""
    details = error.errors(include_url=False, include_context=False)
    return "; ".join(map(_one_line, _by_key(details)))


def _by_key(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """One error per key: a union reports one per member."""
    first: dict[object, ErrorDetails] = {}
    for detail in details:
        first.setdefault(detail["loc"][0] if detail["loc"] else "", detail)
    return list(first.values())


def _one_line(detail: ErrorDetails) -> str:
    name = detail["loc"][0] if detail["loc"] else "settings"
    message = " ".join(detail["msg"].split())
    return f"{name}: {message[:1].lower()}{message[1:]}, not {reprlib.repr(detail['input'])}"
