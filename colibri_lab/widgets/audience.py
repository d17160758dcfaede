"""Whether somebody looks: pages say so while the board is in sight, and for nobody no picture is made."""

from __future__ import annotations

import asyncio
import time

SILENT_S = 7.0  # pages speak every other second
_GRACE_S = 0.5  # in which a kernel that was busy takes what waited for it


class Audience:
    """Counts as looking until it has been silent for SILENT_S.

    A kernel that is busy with a cell may hear nothing meanwhile, so silence counts only when its loop came round. Made
    on the kernel's main thread; without a running loop (a script) there is no page to wait for.
    """

    def __init__(self) -> None:
        self._heard = self._round = time.monotonic()
        self._asked = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def hear(self) -> bool:
        """A page spoke; True where nobody had been looking. Any thread."""
        silent, self._heard = not self.looks(), time.monotonic()
        return silent

    def looks(self) -> bool:
        """Any thread; costs a comparison of clocks."""
        silent = time.monotonic() - self._heard > SILENT_S
        if not silent or self._loop is None or self._loop.is_closed():
            return not silent
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._came_round)
        return self._round - self._heard <= SILENT_S

    def _came_round(self) -> None:
        assert self._loop is not None
        self._loop.call_later(_GRACE_S, self._listened)

    def _listened(self) -> None:
        self._round, self._asked = time.monotonic(), False
