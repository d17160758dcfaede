"""Stop texts across token boundaries: text that could still become a stop text is held back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import RequestError


class StopTexts:
    """Feed pieces of text, get what may be shown. The first stop text to be complete ends it and is not shown."""

    def __init__(self, stop: str | Iterable[str] | None) -> None:
        single = isinstance(stop, str) or not isinstance(stop, Iterable)
        self._stops: tuple[Any, ...] = () if stop is None else (stop,) if single else tuple(stop)
        if not all(isinstance(text, str) and text for text in self._stops):
            raise RequestError("stop must be a text or a list of texts, none of them empty")
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text to show, whether a stop text is complete). After True nothing may be pushed."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:  # the first to be complete, whatever the token boundaries; of two that end together the longer
            self._held = ""
            return text[: min(ends)[1]], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
