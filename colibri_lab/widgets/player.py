"""A recorded run on the board, at the speed of the run or another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colibri_lab.telemetry import ReplaySource, replay
from colibri_lab.view.past import Past, Stop
from colibri_lab.view.report import figure, report
from colibri_lab.view.run import RunView
from colibri_lab.widgets.alone import Words
from colibri_lab.widgets.board import WINDOW, Board
from colibri_lab.widgets.pictures import Pictures
from colibri_lab.widgets.study import Study
from colibri_lab.widgets.ticker import rate
from colibri_lab.widgets.travel import Travel


class Player(Travel, Study, Pictures):
    """Shows a trace: first all of it, then, after play(), as it happened. speed 1 is the speed of the run."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        hz: float,
        bundle: Callable[[Board, str, str], dict[str, Any]],
    ) -> None:
        hz = rate(hz)
        self.source: ReplaySource = replay(path)
        self.speed = 1.0
        self._bundle = bundle
        self._about = self.source.engine | {name: getattr(self.source, name) for name in ("layers", "experts", "top_k")}
        self._lock = threading.RLock()
        self._at_ns = self._last = 0.0
        self._mode = "recorded"  # recorded, replay, paused
        self.past = Past(self._fresh(), self.source)
        self.view = self._fresh()
        self.view.drain(self.source, self._cursor)
        speed = {"name": "speed", "label": "speed", "unit": "x", "min": 0.25, "max": 8, "step": 0.25, "scale": 1}
        can = ["start", "pause", "stop"]
        self.board = Board(self.view, self._feed, self._state, self._act, hz, self.look_aside,
                           controls=[speed, WINDOW], can=can)  # fmt: skip

    def _fresh(self) -> RunView:
        self._cursor = self.source.cursor()
        return RunView(self.source.layers, self.source.experts, self.source.top_k, self._about)

    def play(self, speed: float | None = None) -> None:
        """From the beginning, or on from a pause; returns at once. ValueError for a speed outside 0.01 to 1000."""
        if speed is not None and not 0.01 <= speed <= 1000:
            raise ValueError(f"speed is {speed}: a run is shown at 0.01 to 1000 times its own speed")
        with self._lock:
            self.speed = self.speed if speed is None else float(speed)
            if self._mode != "paused":
                self.view, self._at_ns = self._fresh(), float(self.source.start_ns)
                self.board.show(self.view)
            self._mode, self._last = "replay", time.monotonic()

    def pause(self) -> None:
        with self._lock:
            if self._mode == "replay":
                self._mode = "paused"

    def stop(self) -> None:
        """To the end of the run."""
        with self._lock:
            self._mode = "recorded"

    def live(self) -> None:
        """To the end of the run."""
        self.stop()
        self.board.tick()

    @property
    def at(self) -> int | None:
        return None if self._mode == "recorded" else self._number

    @property
    def shown(self) -> RunView:
        return self.view

    def _stand(self, stop: Stop) -> None:
        with self._lock:
            self.view, self._cursor = stop
            self._at_ns, self._mode = float(self.view.timeline.last_ns), "paused"
            self.board.show(self.view)

    @property
    def state(self) -> str:
        """recorded (all of it is shown), replay or paused."""
        return self._mode

    @property
    def text(self) -> Words:
        """What the recorded run said, as far as it is shown; the last line of a cell shows it live."""
        self.board.tick()
        return self.words(self.view.prose.text)

    @property
    def error(self) -> Exception | None:
        return self.board.error

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run as one HTML file, as lab.report does."""
        return report(RunView.of(self.source, self._about), path)

    def close(self) -> None:
        """Ends the ticker and the board; idempotent."""
        self.board.close()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<replay of {self.source.path.name}: {self.view.line()}, {self._mode}>"

    def _repr_html_(self) -> str:
        return figure(self.board.shown)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self._bundle(self.board, repr(self), self._repr_html_())

    def _feed(self) -> int:
        with self._lock:
            if self._mode == "recorded":
                return self.view.drain(self.source, self._cursor)
            if self._mode == "paused":
                return 0
            now = time.monotonic()
            self._at_ns += (now - self._last) * 1e9 * self.speed
            self._last = now
            batch = self.source.read_until(self._cursor, int(self._at_ns))
            if self._at_ns >= self.source.end_ns:
                self._mode = "recorded"
            self.view.take(batch)
            return len(batch) + batch.dropped

    def _state(self) -> dict[str, Any]:
        settings = {"speed": self.speed, "window": self.view.experts.window}
        notes = "; ".join(self.source.trouble) or None
        told = {"state": self._mode, "model": self.view.line(), "settings": settings, "error": notes}
        return told | self._moment(int(self.source.moments[-1]) if len(self.source.moments) else 0)

    def _act(self, message: dict[str, Any]) -> None:
        what = message["do"]
        if self.studied(message) or self.travelled(message):
            return
        if what in ("start", "resume"):
            self.play()
        elif what in ("pause", "stop"):
            getattr(self, what)()
        elif what == "set" and message["name"] == "speed":
            self.speed = min(max(float(message["value"]), 0.25), 8.0)
        else:
            raise ValueError(f"a recorded run knows no {what!r}")
