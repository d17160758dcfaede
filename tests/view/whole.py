"""A frame with its blocks, as a page puts them together."""

from __future__ import annotations

from colibri_lab.view.blocks import names
from colibri_lab.view.frame import block, board_frame, unpack


def picture(view, state=None, after=-1):
    """(header, arrays) of everything; the newer of a name stands."""
    header, arrays = {}, {}
    for part in (*(block(view, name) for name in names(view)), board_frame(view, state or {}, after)[0]):
        told, found = unpack(part)
        header |= told
        arrays |= found
    return header, arrays
