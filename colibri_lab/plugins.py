"""Objects written elsewhere, by name: `module:name`, or an entry point of an installed package."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from .errors import ConfigError

ROUTERS = "colibri_lab.routers"  # the group of a package's pyproject.toml


def known(text: str, group: str) -> bool:
    """Whether `text` may name an object: it has the form module:name, or a package offers it."""
    return ":" in text or any(point.name == text for point in entry_points(group=group))


def load(text: str, group: str, method: str, key: str) -> Any:
    """The object named, an instance where it is a class. ConfigError says which part of the name is wrong."""
    try:
        if ":" in text:
            module, _, name = text.partition(":")
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        else:
            found = next(point for point in entry_points(group=group) if point.name == text).load()
        if isinstance(found, type):
            found = found()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"settings: {key}: {text!r} cannot be loaded: {error}") from error
    if not callable(getattr(found, method, None)):
        raise ConfigError(f"settings: {key}: {text!r} has no {method}()")
    return found
