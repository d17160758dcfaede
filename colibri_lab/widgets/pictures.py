"""Each panel of a board on its own, as a static figure: `lab.pages` as the last line of a cell shows it."""

from __future__ import annotations

from colibri_lab.view.report import Figure
from colibri_lab.view.run import RunView
from colibri_lab.widgets.board import Board


class Pictures:
    """What a lab and a player have in common: a view, and figures of it as it is now."""

    view: RunView
    board: Board

    def figure(self, name: str | None = None) -> Figure:
        """The board's panels at this moment, or one of them, as a picture that a saved notebook keeps.

        ValueError for a name that is no panel's: experts, time, kv, latency, pages, router, dispatch, batch.
        """
        self.board.tick()
        return Figure(self.board.shown, name)

    @property
    def router(self) -> Figure:
        """Certificates, candidates and wrong selections over time."""
        return self.figure("router")

    @property
    def pages(self) -> Figure:
        """Where the experts that were asked for were found, guesses, bytes read."""
        return self.figure("pages")

    @property
    def kv(self) -> Figure:
        """The KV slots with their owners."""
        return self.figure("kv")

    @property
    def dispatch(self) -> Figure:
        """Rings, stalls, reads hidden and waited for."""
        return self.figure("dispatch")

    @property
    def batch(self) -> Figure:
        """Requests that ran and waited, and why the batch changed."""
        return self.figure("batch")
