"""Ctrl-C while a step runs: it waits for a safe place, so that no table is left half-written and no lock held."""

from __future__ import annotations

# The C functions behind `signal`, without its conversion to enums, which costs 10 us a step.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_INTERRUPT = int(signal.SIGINT)


class Shield:
    """Context around a step. In the main thread SIGINT is noted in `pressed` (which the forward pass looks at) and
    given to the handler that was there before when the context ends; in other threads nothing happens. May be nested.

    While it is on no KeyboardInterrupt can strike between two statements, so a lock may be taken and given back.
    """

    def __init__(self, pressed: list[object]) -> None:
        self.pressed = pressed
        self._before: Callable[..., Any] | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            before = _signal.getsignal(_INTERRUPT)
            if not callable(before):
                return  # ignored, or the system's own way: nothing to hold back
            self.pressed.clear()
            self._before = before
            _signal.signal(_INTERRUPT, self._note)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            return False
        self._depth -= 1
        if self._depth:
            return False
        assert self._before is not None
        _signal.signal(_INTERRUPT, self._before)
        if not self.pressed:
            return False
        frame = self.pressed[0]
        self.pressed.clear()
        self._before(_INTERRUPT, frame)  # raises KeyboardInterrupt, unless it is somebody's own
        return isinstance(error, KeyboardInterrupt)  # their own chose to go on: the step is only done again

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.pressed.append(frame)
