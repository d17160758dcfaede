"""Live settings: read and written from any thread, taken over by the engine at the next token boundary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..config import Config, unknown
from ..errors import ConfigError, EngineClosed

_KEYS = frozenset(Config.model_fields)  # asked for with every picture of the board


class Board:
    """What the engine keeps: the settings as written, checked, and those not yet taken over."""

    def __init__(self, config: Config, limits: dict[str, int], check_budget: Callable[[int], Any]) -> None:
        """limits: the largest value of keys whose arrays were sized at load."""
        self.config = config
        self._limits, self._check_budget = limits, check_budget
        self._lock = threading.Lock()
        self._pending: dict[str, Any] = {}
        self.closed = False  # nobody takes anything over any more

    def set(self, values: dict[str, Any]) -> None:
        """Check and keep; ConfigError names the key, and nothing is kept then. EngineClosed after the engine's end."""
        if self.closed:
            raise EngineClosed(f"settings: {', '.join(values)}: the engine is closed; load it anew with this setting")
        for name in values:
            if name not in Config.model_fields:
                raise ConfigError(f"settings: {unknown(name)}")
            if name not in Config.live_keys():
                live = ", ".join(Config.live_keys())
                raise ConfigError(f"settings: {name} is fixed when the model is loaded; live are {live}")
        with self._lock:
            config = self.config.replace(**values)
            for name, most in self._limits.items():
                if name in values and getattr(config, name) > most:
                    raise ConfigError(
                        f"settings: {name} can be at most {most}, its value at load; load the engine with more"
                    )
            if "expert_cache_bytes" in values and config.expert_cache_bytes is not None:
                self._check_budget(config.expert_cache_bytes)
            self.config = config
            self._pending |= {name: getattr(config, name) for name in values}

    @property
    def changed(self) -> bool:
        """Whether something was written that the engine has not taken over yet."""
        return bool(self._pending)

    def take(self) -> tuple[Config, dict[str, Any]]:
        """The settings, and what changed since the last call."""
        if not self._pending:
            return self.config, {}
        with self._lock:
            pending, self._pending = self._pending, {}
            return self.config, pending


class Settings:
    """The engine's settings as attributes: read all, write the live ones, in force from the next token on."""

    __slots__ = ("_apply", "_board")

    def __init__(self, board: Board, apply: Callable[[], None]) -> None:
        object.__setattr__(self, "_board", board)
        object.__setattr__(self, "_apply", apply)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in _KEYS:
            raise AttributeError(f"settings: {unknown(name)}")
        return getattr(self._board.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.set(**{name: value})

    @property
    def config(self) -> Config:
        """All settings as last written: another object after each change."""
        now: Config = self._board.config
        return now

    def set(self, **values: Any) -> None:
        """Write several at once, all or none."""
        self._board.set(values)
        self._apply()

    def as_dict(self) -> dict[str, Any]:
        """All settings as last written, by key."""
        return {name: getattr(self._board.config, name) for name in Config.model_fields}

    def __dir__(self) -> list[str]:
        return [*Config.model_fields, "config", "set", "as_dict"]

    def __repr__(self) -> str:
        live = ", ".join(f"{name}={getattr(self, name)!r}" for name in Config.live_keys())
        return f"<live settings: {live}>"

    def _repr_html_(self) -> str:
        return str(self._board.config._repr_html_())
