"""`expert_placement`: where experts are computed, by patterns of layers and experts.

One word for all of them, or a mapping from patterns to words. A pattern is "LAYER" or "LAYER.EXPERT", with the signs of
file names (*, ?, [0-3]); the last one that matches an expert counts, and where none does it is the GPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError

PLACES = ("gpu", "cpu", "auto")  # as numbers: their index, as in ops/types.py
Rules = tuple[tuple[str, str], ...]  # (pattern, place)


def rules(value: Any) -> Rules:
    """A setting's value as rules. ConfigError says what is wrong with it, without the name of the key."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (("*", _place(value)),)
    if not isinstance(value, Mapping):
        raise ConfigError(f"a word ({', '.join(PLACES)}) or a mapping from patterns to words, not {value!r}")
    made = []
    for pattern, place in value.items():
        if isinstance(pattern, bool) or not isinstance(pattern, (str, int)):
            raise ConfigError(f"{pattern!r} is no pattern; write it in quotes: '3' or '3.7' or '*.7'")
        if not isinstance(place, str):
            raise ConfigError(f"{pattern}: {place!r} is none of {', '.join(PLACES)}")
        made.append((str(pattern), _place(place)))
    return tuple(made)


def resolve(given: Rules, sparse: Sequence[bool], experts: int) -> NDArray[np.int8]:
    """int8 [L, E] of indices into PLACES. ConfigError for a pattern that matches no expert of the model."""
    places = np.full((len(sparse), experts), PLACES.index("gpu"), np.int8)
    names = {f"{layer}.{e}": (layer, e) for layer, here in enumerate(sparse) if here for e in range(experts)}
    for pattern, place in given:
        wanted = pattern if "." in pattern or pattern == "*" else f"{pattern}.*"
        found = [at for name, at in names.items() if fnmatchcase(name, wanted)]
        if not found:
            layers = [str(layer) for layer, here in enumerate(sparse) if here]
            near = difflib.get_close_matches(pattern, names if "." in pattern else layers, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            there = f"0 to {len(layers) - 1}" if all(sparse) else ", ".join(layers)
            raise ConfigError(
                f"settings: expert_placement: {pattern!r} matches no expert: there are layers {there}, and experts 0 "
                f"to {experts - 1} in each{hint}"
            )
        for at in found:
            places[at] = PLACES.index(place)
    return places


def _place(word: str) -> str:
    if word in PLACES:
        return word
    near = difflib.get_close_matches(word, PLACES, 1, 0.4)
    raise ConfigError(f"{word!r} is none of {', '.join(PLACES)}" + (f"; did you mean {near[0]}?" if near else ""))
