"""Each panel of a board on its own: `lab.pages` as the last line of a cell shows it, live where there is a kernel."""

from __future__ import annotations

from functools import partial

from colibri_lab.view.report import Figure
from colibri_lab.view.run import RunView
from colibri_lab.widgets.alone import Words, view_of
from colibri_lab.widgets.board import Board


class Pictures:
    """What a lab and a player have in common: a view, and its panels, as pictures or live."""

    view: RunView
    board: Board

    def figure(self, name: str | None = None) -> Figure:
        """The board's panels at this moment, or one of them, as a picture that a saved notebook keeps.

        ValueError for another name than experts, time, kv, latency, text, pages, router, cache, dispatch, batch.
        """
        self.board.tick()
        return Figure(self.board.shown, name)

    def panel(self, name: str) -> Figure:
        """One panel, live; without a kernel its picture of this moment. Names as for figure()."""
        found = self.figure(name)
        found.live = lambda: view_of(self.board.panel(name))
        return found

    def words(self, text: str) -> Words:
        """A text that is shown as the board's panel of it."""
        said = Words(text)
        said.live = lambda: view_of(self.board.panel("text"))
        said.picture = lambda: self.figure("text").html
        return said

    experts = property(partial(panel, name="experts"), doc="Share of each expert, and which of them are in memory.")
    stages = property(partial(panel, name="time"), doc="Where each token's time went, and what its experts cost.")
    latency = property(partial(panel, name="latency"), doc="How long tokens took: histogram, share below, percentiles.")
    kv = property(partial(panel, name="kv"), doc="The KV slots with their owners.")
    pages = property(partial(panel, name="pages"), doc="Which pages are in memory, faults, guesses, bytes read.")
    router = property(partial(panel, name="router"), doc="Certificates, candidates and wrong selections over time.")
    dispatch = property(partial(panel, name="dispatch"), doc="Rings, stalls, reads hidden and waited for.")
    gpu = property(partial(panel, name="gpu"), doc="Experts on the GPU, transfers, who computes, steps as graphs.")
    batch = property(partial(panel, name="batch"), doc="Requests that ran and waited, and why the batch changed.")
