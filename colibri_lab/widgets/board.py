"""The board: one anywidget that draws frames of bytes and sends small messages back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anywidget
import traitlets

from colibri_lab.view.blocks import names, turns
from colibri_lab.view.detail import detail
from colibri_lab.view.frame import block, board_frame, prose_block
from colibri_lab.view.run import RunView
from colibri_lab.view.systems import described
from colibri_lab.widgets.alone import Panel
from colibri_lab.widgets.audience import Audience
from colibri_lab.widgets.ticker import Ticker, rate

_HERE = Path(__file__).parent
_SCRIPTS = "colours frame focus panel table experts time slots latency prose tiles controls pages systems".split()
_SCRIPTS += "travel token study compare findings whatif tuner looking board".split()
_WATCHED_S = 6.0
_PROSE_EVERY_S = 5.0  # how old the text of a picture that is saved while generating may be

# a control that every board has: it changes the view, not the engine
WINDOW = {
    "name": "window",
    "label": "share over the last",
    "unit": "tokens",
    "min": 8,
    "max": 1024,
    "step": 8,
    "scale": 1,
}
WINDOW |= {"help": "how many tokens the expert map looks back"}
MOVES = ("seek", "step", "live")  # what draws the picture itself, before it returns
State = dict[str, Any]
Kept = TypeVar("Kept")


class Board(anywidget.AnyWidget):
    """`frame` is the last picture, `pool`, `lines` and `map` its slower parts, `prose` the text before it: with them a
    page that is loaded again shows the same.

    feed(): takes new events into the view, returns how many. state(): what the picture says beside the view's figures.
    act(message): what a person did, {"do": "start" | "pause" | "resume" | "stop" | "set", ...}; runs on the kernel's
    main thread, what it raises is shown on the board. aside(): work for a page that is looked at, with every tick.
    frames(layer, expert): where each page of an expert lies, for what is pointed at.
    """

    _esm = "\n".join((_HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    _css = "\n".join((_HERE / f"{name}.css").read_text(encoding="utf-8") for name in ("board", "travel"))
    frame = traitlets.Bytes(b"").tag(sync=True)
    pool = traitlets.Bytes(b"").tag(sync=True)
    lines = traitlets.Bytes(b"").tag(sync=True)
    map = traitlets.Bytes(b"").tag(sync=True)
    prose = traitlets.Bytes(b"").tag(sync=True)
    systems: Any = traitlets.List([]).tag(sync=True)
    controls: Any = traitlets.List([]).tag(sync=True)
    study: Any = traitlets.Dict({}).tag(sync=True)
    whatif: Any = traitlets.Dict({}).tag(sync=True)
    tuner: Any = traitlets.Dict({}).tag(sync=True)
    tuned: Any = traitlets.Dict({}).tag(sync=True)
    moments: Any = traitlets.Dict({}).tag(sync=True)
    detail: Any = traitlets.Dict({}).tag(sync=True)
    pointed: Any = traitlets.Dict({}).tag(sync=True)
    can: Any = traitlets.List([]).tag(sync=True)
    prompt = traitlets.Unicode("").tag(sync=True)
    max_tokens = traitlets.Int(200).tag(sync=True)

    def __init__(
        self,
        view: RunView,
        feed: Callable[[], int],
        state: Callable[[], State],
        act: Callable[[State], None],
        hz: float = 8,
        aside: Callable[[], None] | None = None,
        frames: Callable[[int, int], list[int]] | None = None,
        **traits: Any,
    ) -> None:
        hz = rate(hz)  # before there is a widget that would have to go again
        super().__init__(systems=described(), **traits)
        self.view = view
        self.updates = 0
        self._alone: dict[str, Panel] = {}
        self._next: RunView | None = None
        self._held: RunView | None = None
        self._moments: State = self.moments  # told, and sent with the next picture
        self._feed, self._state, self._act = feed, state, act
        self._aside, self._watched = aside, -_WATCHED_S
        self._frames = frames
        self._pointed: State = {}
        self._audience = Audience()
        self._lock = threading.RLock()
        self._said: State | None = None
        self._sent = (-2, -1)  # sequence and position of the last piece of text that was sent
        self._epoch = 0
        self._stale = self._again = True  # a page lacks the text; the picture is to be drawn even if nothing is new
        self._prose_at, self._prompt = 0.0, ""
        self._trouble = ""
        self.on_msg(self._message)
        self._ticker = Ticker(self.tick, hz)
        self.tick()

    @property
    def hz(self) -> float:
        return self._ticker.hz

    @hz.setter
    def hz(self, value: float) -> None:
        self._ticker.hz = value

    @property
    def error(self) -> Exception | None:
        """What ended the ticker, if anything."""
        return self._ticker.error

    def now(self, look: Callable[[RunView], Kept]) -> Kept:
        """What `look` makes of the view with all events so far, while nothing changes it."""
        with self._lock:
            self.tick()
            return look(self.view)

    def ask(self, prompt: str, max_tokens: int) -> None:
        """Shows a prompt in the box where a person types the next one."""
        with self._lock:  # the ticker may be in the middle of a message
            self.prompt, self.max_tokens = prompt, max_tokens

    def show(self, view: RunView) -> None:
        """Goes on with another view (a replay that starts again, or elsewhere)."""
        self._next = view  # taken over by the next tick: no lock here, the caller may hold its own

    @property
    def shown(self) -> RunView:
        """The view that is drawn: the one that is fed, or one of the past that is held."""
        return self._held or self._next or self.view

    def hold(self, view: RunView | None) -> None:
        """Draws this view while the other one is fed; None: the other one again."""
        with self._lock:
            if view is not None:
                _dress(view, self.view)
            self._held, self._again = view, True

    def tick(self) -> bool:
        """Draws what is new, if anything; True where something was sent. Any thread."""
        with self._lock:
            new, state = self._feed(), self._state()
            self._tell(tuned=state.pop("tuned", self.tuned))
            self._moments = state.pop("moments", self._moments)
            if self._aside is not None and time.monotonic() - self._watched < _WATCHED_S:
                self._aside()
            if self._next is not None:
                _dress(self._next, self.view)
                self.view, self._next, self._again = self._next, None, True
            if self._trouble and not state.get("error"):
                state["error"] = self._trouble
            same = state == self._said and self._moments == self.moments
            if not new and not self._stale and not self._again and same:
                return False
            # a picture that stands still is saved with all of its text
            rests = state["state"] != "generating" and (self._said or {}).get("state") != state["state"]
            if not (self._stale or self._again or rests or self._audience.looks()):
                return False
            self._explain()
            self._said, view = state, self.shown
            sequence = view.prose.sequence
            if sequence < self._sent[0]:  # an earlier text, after which pages would not take it for a new one
                self._epoch, self._sent = self._epoch + 1, (-2, -1)
            view.epoch = self._epoch
            after = self._sent[1] if sequence == self._sent[0] else -1
            frame, last = board_frame(view, state, after)
            old = time.monotonic() - self._prose_at > _PROSE_EVERY_S and last != after
            parts: dict[str, Any] = {"frame": frame} | {name: block(view, name) for name in self._due(state["state"])}
            if self._moments != self.moments:
                parts["moments"] = self._moments
            if self._stale or rests or old or sequence != self._sent[0] or view.prompt != self._prompt:
                parts["prose"], self._prompt = prose_block(view), view.prompt
                self._prose_at = time.monotonic()
            self._publish(parts)
            self._sent, self._stale, self._again = (sequence, last), False, False
            self.updates += 1
            return True

    def _publish(self, parts: dict[str, Any]) -> None:
        """Sets traits and sends them in one message, as hold_sync does, without its checks of values that are our own,
        eight times a second."""
        self._trait_values.update(parts)
        blocks = [name for name, value in parts.items() if isinstance(value, bytes)]
        state = {name: value for name, value in parts.items() if name not in blocks}
        message = {"method": "update", "state": state, "buffer_paths": [[name] for name in blocks]}
        self._send(message, buffers=[parts[name] for name in blocks])

    def _explain(self) -> None:
        """Tells more of what is pointed at, when that changed."""
        told = detail(self.shown, self._pointed) if self._pointed else {}
        if self._frames is not None and self._held is None and told.get("kind") == "expert":
            told["frames"] = self._frames(told["layer"], told["expert"])
        self._tell(pointed=told)

    def _tell(self, **traits: State) -> None:
        """What is sent when it changes, not with each frame: setting a trait to what it is costs its validation."""
        for name, value in traits.items():
            if value != getattr(self, name):
                setattr(self, name, value)

    def _due(self, state: str) -> tuple[str, ...]:
        """The blocks that go with this frame: one after the other while all moves, else all of them."""
        if self._stale or self._again or state not in ("generating", "replay"):
            return names(self.shown)
        round_ = turns(self.shown)
        return round_[self.updates % len(round_)]

    def panel(self, name: str) -> Panel:
        """One panel (a name of report.PANELS, whatif or tuner) as a widget of its own; the same each time."""
        if name not in self._alone:
            self._alone[name] = Panel(self, name)
        return self._alone[name]

    def _message(self, _: Any, content: State, __: Any) -> None:
        what = content.get("do")
        if what == "watch":  # a page shows what is worked out aside, as it says every other second
            self._watched = time.monotonic()
            return
        unseen = self._audience.hear()
        if what == "look":  # somebody sees the board, as pages say every other second
            self._stale |= unseen
            return
        with self._lock:
            if what == "point":
                self._pointed = dict(content)
                self._explain()
                return
            self._trouble = ""
            if what == "hello":  # a page was opened, or it missed a piece of text
                self._stale = True
                return
        try:
            if what == "set" and content.get("name") == "window":
                for view in (self.view, self.shown):
                    view.experts.window = int(content["value"])
            elif what == "set" and content.get("name") == "hue":
                self.view.hue = self.shown.hue = "sequence" if content["value"] == "sequence" else "expert"
            else:
                self._act(content)
        except Exception as error:  # a person looks at the board, not at a log
            self._trouble = f"{type(error).__name__}: {error}"
        if what not in MOVES or self._trouble:
            self._again = True

    def close(self) -> None:
        """Ends the ticker and the widget; idempotent."""
        self._ticker.stop()
        for panel in self._alone.values():
            panel.close()
        self._alone.clear()
        if self.comm is not None:
            self.layout.close()  # a widget of its own, that would stay in the notebook
        super().close()


def _dress(view: RunView, like: RunView) -> None:
    """What a person chose of a picture stays when another moment is shown."""
    view.hue, view.experts.window = like.hue, like.experts.window
