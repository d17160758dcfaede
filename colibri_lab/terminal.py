"""Standard streams as they may be found: closed, or with an encoding that cannot say everything."""

from __future__ import annotations

import os
import sys


def prepare() -> None:
    """Marks that a stream cannot encode are replaced; a closed stream becomes one that goes nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            to_nowhere(number)  # else the next file opened would get its number
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
        elif number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def to_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
