"""Colibri Lab: a mixture-of-experts inference engine and its laboratory.

Importing this loads almost nothing; each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Config": "config",
    "ConfigError": "errors",
    "Engine": "engine.engine",
    "EngineClosed": "errors",
    "Lab": "widgets.dashboard",
    "ModelError": "model.errors",
    "ModelFile": "model.store",
    "NotAvailable": "errors",
    "PagerError": "errors",
    "Recorder": "telemetry",
    "RequestError": "errors",
    "Runs": "view.kept",
    "Sampler": "engine.sampling",
    "Sampling": "engine.sampling",
    "Session": "engine.session",
    "SlotsExhausted": "errors",
    "Telemetry": "telemetry",
    "Token": "engine.sequence",
    "Tokenizer": "model.tokenizer",
    "connect": "widgets.dashboard",
    "embedded_model": "paths",
    "replay": "widgets.dashboard",
    "report": "view.report",
}
__all__ = ["load", *_WHERE]

if TYPE_CHECKING:
    from .config import Config as Config
    from .engine.engine import Engine as Engine
    from .engine.sequence import Token as Token
    from .paths import embedded_model as embedded_model


def load(path_or_config: Any, **overrides: Any) -> Engine:
    """Short for Engine.load."""
    from .engine.engine import Engine

    return Engine.load(path_or_config, **overrides)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'colibri_lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
