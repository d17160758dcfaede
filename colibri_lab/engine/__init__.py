"""The engine: sequences, batching, the step, sampling, live settings, and the worker thread for the lab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .sequence import Token as Token
    from .session import Session as Session

__all__ = ["Engine", "Session", "Token"]
_WHERE = {"Engine": "engine", "Session": "session", "Token": "sequence"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
