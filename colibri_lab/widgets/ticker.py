"""One thread that calls a function a few times a second, and goes when the owner of the function goes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any


def rate(hz: float) -> float:
    """`hz`, or ValueError where a board cannot be drawn so often."""
    if not 1 <= hz <= 10:
        raise ValueError(f"hz is {hz}: a board is drawn 1 to 10 times a second")
    return float(hz)


class Ticker:
    """Calls `act` (a bound method, held weakly) `hz` times a second, 1 to 10. Late calls are dropped, never queued."""

    def __init__(self, act: Callable[[], Any], hz: float = 8) -> None:
        self._act = weakref.WeakMethod(act)
        self._end = threading.Event()
        self.hz = hz
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._end), name="colibri-ticker", daemon=True
        )
        self._thread.start()

    @property
    def hz(self) -> float:
        return self._hz

    @hz.setter
    def hz(self, value: float) -> None:
        self._hz = rate(value)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread and waits for it, unless it is the caller."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2)

    def __del__(self) -> None:
        self._end.set()

    def _tick(self) -> bool:
        act = self._act()
        if act is None:
            return False
        try:
            act()
        except Exception as error:  # shown by the owner: a thread has nobody to raise to
            self.error = error
        return self.error is None


def _run(ticker: weakref.ref[Ticker], end: threading.Event) -> None:
    due = time.monotonic() + 0.05
    while not end.wait(max(0.0, due - time.monotonic())):
        strong = ticker()
        if strong is None or not strong._tick():
            return
        due = max(due + 1 / strong.hz, time.monotonic() + 0.2 / strong.hz)  # a late one shifts the rest
        del strong
