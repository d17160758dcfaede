"""Types of config values that a person writes in more ways than one: sizes, paths, core masks and switches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?I?B)?\s*", re.IGNORECASE)


def parse_size(value: object) -> object:
    """Bytes of 1024, "512MiB" (powers of 1024) or "1.5 GB" (powers of 1000); other types are left to the type check."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or (match[2] or "").upper() not in _UNITS:
        raise PydanticCustomError("size", 'a size is a number of bytes or like "512MiB"')
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def _path(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str) and value else value


def _mask(value: object) -> object:
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,256}", value) is None:
        raise PydanticCustomError("mask", 'a mask of cores is a number or like "0x3", which are cores 0 and 1')
    return int(value, 16)


def _switch(value: object) -> object:
    """YAML reads on and off, yes and no as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


CoreMask = Annotated[int, BeforeValidator(_mask)]
Size = Annotated[int, BeforeValidator(parse_size)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
