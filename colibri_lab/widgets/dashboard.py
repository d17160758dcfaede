"""The lab: an engine, its worker thread and its board in one. The only part of the display that knows an engine."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

from colibri_lab.config import Config
from colibri_lab.errors import ConfigError
from colibri_lab.telemetry import Recorder
from colibri_lab.view.past import Past, Stop
from colibri_lab.view.report import figure, report
from colibri_lab.view.run import RunView
from colibri_lab.widgets.alone import Words, view_of
from colibri_lab.widgets.board import WINDOW, Board
from colibri_lab.widgets.pictures import Pictures
from colibri_lab.widgets.player import Player
from colibri_lab.widgets.study import Study
from colibri_lab.widgets.ticker import rate
from colibri_lab.widgets.travel import Travel
from colibri_lab.widgets.tuner import Tuner

MIB = 1 << 20
_open: weakref.WeakValueDictionary[object, Lab] = weakref.WeakValueDictionary()


class Lab(Travel, Study, Pictures):
    """Shows an engine while it generates. path_or_engine: what Engine.load takes (the lab owns it then), or an Engine.

    The last line `lab` of a cell shows the board. hz: pictures a second, 1 to 10. overrides: keys for Engine.load,
    ConfigError where the engine is loaded already; what Engine.load raises; ValueError for another hz.
    A second lab of the same engine or path closes the first, so that a cell run again leaves nothing behind.
    """

    def __init__(self, path_or_engine: Any, hz: float = 8, **overrides: Any) -> None:
        hz = rate(hz)
        owned = isinstance(path_or_engine, (str, os.PathLike, Config))
        if overrides and not owned:
            raise ConfigError(f"settings: {', '.join(overrides)}: the engine is loaded already; load it with them")
        named = isinstance(path_or_engine, (str, os.PathLike))
        key: object = str(Path(path_or_engine).absolute()) if named else id(path_or_engine)
        if (before := _open.pop(key, None)) is not None:
            before.close()
        self.engine = _load(path_or_engine, overrides) if owned else path_or_engine
        self._owned, self._closed = owned, False
        self.session = self.engine.session()
        self._about = self.engine.describe()
        self._cursor = self.engine.telemetry.cursor()
        self.engine.snapshot()  # it may have run before
        about = self._about
        self.view = RunView(about["layers"], about["experts"], about["top_k"], about)
        self.past = Past(RunView(about["layers"], about["experts"], about["top_k"], about))
        self._held: RunView | None = None
        self.source = self.engine.telemetry
        self._limit: int | None = None
        self._sampling: dict[str, Any] = {}
        self.tuner = Tuner(self.engine.settings, about, self.set)
        can = ["start", "pause", "stop", "prompt"]
        self.board = Board(
            self.view,
            self._feed,
            self._state,
            self._act,
            hz,
            controls=_controls(about),
            can=can,
            prompt="Once upon a time",
            aside=self.look_aside,
            frames=self.engine.pages,
            tuner=self.tuner.described(),
        )
        self.tuner.live = lambda: view_of(self.board.panel("tuner"))
        _open[key] = self

    # -- running --

    def generate(self, prompt: str | list[int], max_tokens: int = 200, **sampling: Any) -> None:
        """Begins to generate and returns at once; the board shows the text. Arguments as for engine.generate.

        The board's Start button generates with the sampling arguments of the last call.
        """
        shown = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        self.session.start(prompt, max_tokens=max_tokens, **sampling)
        self.engine.telemetry.note("prompt", {"sequence": self.session.sequence, "text": shown[:2000],
                                                  "sampling": {"max_tokens": max_tokens, **sampling}})  # fmt: skip
        self._limit, self._sampling = max_tokens, sampling
        self.board.ask(shown[:2000], max_tokens)

    def pause(self) -> None:
        """Holds generation before its next token."""
        self.session.pause()

    def resume(self) -> None:
        self.session.resume()

    def stop(self) -> None:
        """Ends generation after the token under way; the text so far stays."""
        self.session.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the generation to end and the board to show it; False if paused, or not done in `timeout` s."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.state != "paused":
            left = 0.2 if end is None else min(0.2, end - time.monotonic())
            self.session.join(max(0.0, left))
            if self.state in ("idle", "error") or left <= 0:
                break
        self.board.tick()
        return self.state in ("idle", "error")

    def set(self, name: str, value: Any) -> None:
        """Writes a live setting, in force from the next token on: lab.set("expert_cache_bytes", "4MiB")."""
        self.session.set(name, value)

    @property
    def state(self) -> str:
        """idle, generating, paused, stopping or error."""
        return str(self.session.state)

    @property
    def text(self) -> Words:
        """What the running or last generation said so far; the last line of a cell shows it live."""
        return self.words(str(self.session.text))

    @property
    def error(self) -> BaseException | None:
        """What went wrong in a thread: in the generation or on the board. A notebook asserts that it is None."""
        return self.session.error or self.board.error

    # -- looking back --

    def live(self) -> None:
        self.board.now(lambda _: self._hold(None))
        self.board.tick()
        self.past.rest()

    @property
    def at(self) -> int | None:
        return None if self._held is None else self._number

    @property
    def shown(self) -> RunView:
        return self._held or self.view

    def _stand(self, stop: Stop) -> None:
        self._hold(stop[0])

    def _hold(self, view: RunView | None) -> None:
        self._held = view
        self.board.hold(view)

    # -- keeping --

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run as one HTML file with its pictures, readable without kernel or network; returns its path."""
        self.board.tick()
        return report(self.view, path, counters=self.engine.counters())

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Writes events to a trace file from now on, until .close(); colibri_lab.replay(path) shows it again.

        ConfigError where the engine keeps no events (telemetry: false).
        """
        recorder = Recorder(self.engine.telemetry, path, self.engine.describe())
        self.engine.snapshot()
        return recorder

    def close(self) -> None:
        """Stops the generation, the ticker and the board, and the engine where the lab loaded it; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.session.close()
        self.board.close()
        if self._owned:
            self.engine.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lab {self.view.name}: {self.state}, {len(self.session.tokens)} tokens>"

    def _repr_html_(self) -> str:
        self.board.tick()
        return figure(self.board.shown)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The live board, and the picture of this moment for pages without a kernel."""
        return _bundle(self.board, repr(self), self._repr_html_())

    # -- what the board asks --

    def _feed(self) -> int:
        return self.view.drain(self.engine.telemetry, self._cursor, self.past.add)

    def _state(self) -> dict[str, Any]:
        session, error = self.session, self.session.error
        budget = self.engine.budget_bytes()
        self.view.about["expert_cache_bytes"] = budget
        return {
            "state": session.state,
            "model": self.view.line(),
            "made": len(session.tokens),
            "max_tokens": self._limit,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            **self._moment(self.view.timeline.last_ns),
            "tuned": self.tuner.told(budget),
            "settings": {
                "expert_cache_bytes": budget,
                "pace": self.engine.settings.pace or 0,
                "window": self.view.experts.window,
            },
        }

    def _act(self, message: dict[str, Any]) -> None:
        what = message["do"]
        if self.studied(message) or self.travelled(message):
            return
        if what == "start":
            self.generate(str(message["prompt"]), max(1, int(message["max_tokens"])), **self._sampling)
        elif what == "tune":
            self.tuner.write(str(message["name"]), str(message["value"]), str(message.get("mark", "")))
        elif what == "set" and message["name"] == "pace":
            self.set("pace", float(message["value"]) or None)
        elif what == "set" and message["name"] == "expert_cache_bytes":
            self.set("expert_cache_bytes", int(message["value"]))
        elif what in ("pause", "resume", "stop"):
            getattr(self, what)()
        else:
            raise ValueError(f"the lab knows no {what!r}")


def connect(engine: Any, hz: float = 8) -> Lab:
    """A lab over a running engine; closing the lab leaves the engine open."""
    return Lab(engine, hz)


def replay(path: str | os.PathLike[str], hz: float = 8) -> Player:
    """A board over a recorded trace, without a model: it shows the end of the run, Play shows it again."""
    return Player(path, hz, _bundle)


def _load(path: Any, overrides: dict[str, Any]) -> Any:
    from colibri_lab.engine.engine import Engine

    return Engine.load(path, **overrides)


def _bundle(board: Board, plain: str, html: str) -> dict[str, Any]:
    return view_of(board) | {"text/plain": plain, "text/html": html}


def _controls(about: dict[str, Any]) -> list[dict[str, Any]]:
    one, total = int(about["expert_bytes"]), int(about["experts_total_bytes"])
    least = int(about.get("expert_cache_least_bytes") or one * int(about["top_k"]))
    budget = {"name": "expert_cache_bytes", "label": "experts in memory", "unit": "MiB", "scale": MIB}
    budget |= {
        "min": least / MIB,
        "max": total / MIB,
        "step": one / MIB,
        "help": "budget for expert pages, from the next token on",
    }
    pace = {
        "name": "pace",
        "label": "pace",
        "unit": "tokens/s",
        "min": 0,
        "max": 200,
        "step": 1,
        "scale": 1,
        "zero": "off",
    }
    return [budget, pace | {"help": "slows generation down for the eye"}, WINDOW]
