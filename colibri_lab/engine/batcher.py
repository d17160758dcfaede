"""Which rows the next step has: continuous batching, chunked prefill, decode rows first."""

from __future__ import annotations

from collections import deque

from .sequence import Request, Work


class Batcher:
    """Requests that wait and requests that run. A request that nobody fetches tokens from is not advanced."""

    def __init__(self) -> None:
        self.incoming: deque[Request] = deque()  # appended to by any thread; the rest belongs to the one that steps
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self.running or self.waiting or self.incoming)

    def admit(self, most: int) -> list[Request]:
        """Move requests from waiting to running while fewer than `most` run; the caller seats them."""
        self._collect()
        admitted: list[Request] = []
        while self.waiting and len(self.running) < most:
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def plan(self, chunk: int, most: int, everybody: bool = False) -> tuple[list[Work], int]:
        """Rows of the next step: one for each decoding request, then up to `chunk` prompt rows.

        most: requests that advance, the oldest first; the result tells also how many are held back.
        everybody: advance also those whose last token was not fetched yet (somebody waits for a seat).
        """
        able = self.running if everybody else [r for r in self.running if not r.ready]
        wanted = able[:most]
        works = [Work(r, r.done, 1, True) for r in wanted if r.done == len(r.ids) - 1 and r.done >= r.prompt]
        for r in wanted:
            left = r.prompt - r.done
            if left > 0 and chunk > 0:
                count = min(left, chunk)
                works.append(Work(r, r.done, count, count == left))
                chunk -= count
        return works, len(able) - len(wanted)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        self._collect()
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _collect(self) -> None:
        while self.incoming:
            self.waiting.append(self.incoming.popleft())
