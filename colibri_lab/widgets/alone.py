"""A panel of a board as a widget of its own: `lab.experts` as the last line of a cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from colibri_lab.view.html import Still

Bundle = dict[str, Any]


class Panel(anywidget.AnyWidget):
    """Shows one panel of a board, live. It has no data and no code of its own: the page takes both from the board, so
    another panel costs nothing in the kernel, and what is pointed at in one is marked in all."""

    _esm = (Path(__file__).parent / "js" / "alone.js").read_text(encoding="utf-8")
    board = traitlets.Unicode("").tag(sync=True)
    panel = traitlets.Unicode("").tag(sync=True)

    def __init__(self, board: anywidget.AnyWidget, panel: str) -> None:
        """panel: a name of report.PANELS, or whatif or tuner."""
        super().__init__(board=f"anywidget:{board.model_id}", panel=panel)

    def close(self) -> None:
        """Ends the widget; idempotent."""
        if self.comm is not None:
            self.layout.close()  # a widget of its own, that would stay in the notebook
        super().close()


def view_of(widget: anywidget.AnyWidget) -> Bundle:
    """A widget's MIME bundle."""
    found = widget._repr_mimebundle_()
    return dict(found[0] if isinstance(found, tuple) else found or {})


class Words(str, Still):
    """A text, and the board's panel of it where a cell shows it. picture: makes the HTML for pages without a kernel."""

    picture: Callable[[], str] = str

    def _repr_html_(self) -> str:
        return self.picture()
