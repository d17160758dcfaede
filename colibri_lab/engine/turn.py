"""Who may step the engine: one thread at a time, token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .interrupt import Shield


class Turn:
    """A lock that is held for one step, with what surrounds a step: `between` runs before it, and again after it where
    something came `due` meanwhile (a request abandoned, a setting written). KeyboardInterrupt never leaves it taken."""

    def __init__(self, shield: Shield, between: Callable[[], None], due: Callable[[], bool]) -> None:
        self._lock = threading.Lock()
        self._shield, self._between, self._due = shield, between, due

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn and hold it."""
        with self._shield:
            while not self._lock.acquire(timeout=0.02):
                if self._shield.pressed:
                    raise KeyboardInterrupt
            with self._held():
                yield

    def attempt(self, work: Callable[[], object], seconds: float) -> None:
        """Do `work` in a turn, unless there is none to be had within the time."""
        with self._shield:
            if self._lock.acquire(timeout=seconds):
                with self._held():
                    work()

    def sweep(self) -> None:
        """Run `between` for what is due if nobody steps now; never waits.

        Whoever steps now does it afterwards, so a garbage collector may call this anywhere.
        """
        while self._due():
            with self._shield:
                if not self._lock.acquire(blocking=False):
                    return
                try:
                    self._between()
                finally:
                    self._lock.release()

    def taken(self) -> bool:
        return self._lock.locked()

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            self._between()
            yield
        finally:
            self._lock.release()
            self.sweep()
