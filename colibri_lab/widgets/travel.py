"""Time travel and saving, in what a lab and a player have in common: the picture of any token of the past."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colibri_lab import trace
from colibri_lab.view.html import size
from colibri_lab.view.past import Past, Stop
from colibri_lab.view.run import RunView
from colibri_lab.view.token import TokenDetail
from colibri_lab.widgets.board import Board


class Travel(ABC):
    """Tokens are numbered as they were sampled, from 0, over all sequences. An engine goes on while its board shows an
    earlier token; its own pause is another button."""

    board: Board
    past: Past

    def seek(self, token: int) -> int:
        """Shows the run as it was when this token was there, until live(); returns the number of the token shown.

        Negative numbers count from the newest. A token that is kept no more gives the oldest one. ValueError where
        nothing was sampled yet.
        """
        return self._go(lambda: token if token >= 0 else self.past.last + 1 + token)

    def step(self, by: int = 1) -> int:
        """As seek, to the token that is `by` steps of the engine after the one shown (before it, where negative)."""
        return self._go(lambda: self.past.beside(self._number, by))

    @abstractmethod
    def live(self) -> None:
        """Back to the newest token."""

    @property
    @abstractmethod
    def at(self) -> int | None:
        """The number of the token that is shown; None where that is the newest one, and stays so."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the run, as far as it is kept in memory, as a trace that colibri_lab.replay(path) shows anywhere.

        What is older is told as missing, and the file begins with what was in memory then. OSError names `path` where
        it cannot be written. `record` writes from now on, however long.
        """
        return trace.save(*self.board.now(lambda _: (self.past.events(), path, self.past.about)))

    @property
    @abstractmethod
    def shown(self) -> RunView:
        """The view that the board draws."""

    def token(self, token: int = -1) -> TokenDetail:
        """One token in figures and as a picture: route, gate weights, reads, stages, probabilities. Numbers as in seek.

        ValueError where it is kept no more.
        """
        return self.board.now(lambda _: self.past.detail(token if token >= 0 else self.past.last + 1 + token))

    @abstractmethod
    def _stand(self, stop: Stop) -> None:
        """Shows a view of the past; the cursor of the stop is behind it."""

    def _go(self, choose: Callable[[], int]) -> int:
        self.board.now(lambda _: self._stand(self.past.at(choose())))
        self.board.tick()
        return self._number

    @property
    def _number(self) -> int:
        return self.shown.timeline.sampled - 1

    def travelled(self, message: dict[str, Any]) -> bool:
        """Does what a person asked of the time line; False where the message is not for it."""
        what = message["do"]
        if what == "seek":
            self.seek(int(message["token"]))
        elif what == "step":
            self.step(int(message["by"]))
        elif what == "live":
            self.live()
        elif what == "token":
            place = int(message["sequence"]), int(message["position"])
            detail = self.board.now(lambda _: self.past.detail(self.past.find(*place)))
            self.board.detail = detail.told()
        elif what == "save":
            self._save(str(message["name"]).strip())
        else:
            return False
        return True

    def _save(self, name: str) -> None:
        """By the board's button: into the kernel's folder, and never over a file."""
        if not name or name != os.path.basename(name) or len(name) > 100:
            raise ValueError("a file's name has 1 to 100 characters and no folder; lab.save(path) writes anywhere")
        if os.path.exists(name):
            raise ValueError(f"{name} is there already: choose another name, or call lab.save({name!r})")
        written = self.save(name).stat().st_size
        self._said = f"saved {name}, {size(written)}: colibri_lab.replay({name!r}) shows it anywhere"

    _said = ""
    _told: tuple[Any, str] = (None, "")

    def _moment(self, newest_ns: int) -> dict[str, Any]:
        """Where the picture is, for each frame; beginnings and gaps go to the page when they change."""
        at, past = self.at, self.past
        ago = 0.0 if at is None else (newest_ns - self.shown.timeline.last_ns) / 1e9
        where = {"first": past.first, "last": past.last, "at": -1 if at is None else at, "ago": round(ago, 1)}
        if past.marks is self._told[0] and self._said == self._told[1]:
            return {"past": where}
        self._told = past.marks, self._said
        return {"past": where, "moments": past.marks | {"said": self._said, "name": _free_name()}}


def _free_name() -> str:
    names = (f"run-{n}.trace" for n in itertools.count(1))
    return next(name for name in names if not os.path.exists(name))
