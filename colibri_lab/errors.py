"""Errors that a person can act on: one line that says what is wrong, where, and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is wrong or unknown; the message names the file (or "settings") and the key."""


class NotAvailable(ConfigError):
    """A setting asks for a system that this version does not have yet."""


class RequestError(ValueError):
    """One request cannot be served as asked; the engine and the other requests go on."""


class SlotsExhausted(RequestError):
    """The KV slot pool has no slot left for this request (the one in `seat`)."""

    def __init__(self, message: str, seat: int) -> None:
        super().__init__(message)
        self.seat = seat


class RouterError(ValueError):
    """A router gave something that is no choice of experts."""


class PagerError(OSError):
    """Expert pages could not be read or are damaged (names file, layer and expert), or no room was made for them."""


class EngineClosed(RuntimeError):
    """The engine was used after close()."""
