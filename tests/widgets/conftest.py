"""Counts what widgets send to the page, without a kernel."""

from __future__ import annotations

import ipywidgets
import pytest


class Wire:
    """Messages by kind, and the bytes of the last ones."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict, int]] = []

    def updates(self) -> list[dict]:
        return [state for method, state, _ in self.messages if method == "update"]


@pytest.fixture()
def wire(monkeypatch):
    seen = Wire()

    def send(self, msg, buffers=None):
        state = dict(msg.get("state", {}))
        for path, buffer in zip(msg.get("buffer_paths", []), buffers or [], strict=False):
            state[path[0]] = bytes(buffer)
        seen.messages.append((msg.get("method"), state, sum(len(bytes(b)) for b in buffers or [])))

    monkeypatch.setattr(ipywidgets.Widget, "_send", send)
    return seen
