"""A frame with its blocks, as a page puts them together."""

from __future__ import annotations

from colibri_lab.view.blocks import names
from colibri_lab.view.frame import block, board_frame, unpack


def together(parts):
    """(header, arrays) of some blocks; of a name that two have, the later stands."""
    header, arrays = {}, {}
    for part in parts:
        told, found = unpack(part)
        header |= told
        arrays |= found
    return header, arrays


def blocks(view, state=None, after=-1):
    """All that is drawn of a view, as bytes."""
    return *(block(view, name) for name in names(view)), board_frame(view, state or {}, after)[0]


def picture(view, state=None, after=-1):
    """(header, arrays) of everything."""
    return together(blocks(view, state, after))


def shown(board):
    """(header, arrays) of what a board sent last."""
    return together(part for part in (board.map, board.pool, board.lines, board.frame) if part)
