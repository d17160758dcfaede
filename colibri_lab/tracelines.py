"""The lines of a trace file, hostile until checked: strict JSON objects of bounded length, numbers within limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.events import GAUGES
from colibri_lab.trace import FORMAT, VERSION, Choice, Facts, TraceError

MAX_LINE = 1 << 20  # bytes; a longer line is not one of ours
MAX_NAME = 200  # characters of a gauge's name
LIMITS = {"layers": 1024, "experts": 65535, "top_k": 1024}
MAX_SLOTS = 1 << 24  # views hold an array of them
MAX_CHOICES = 64  # that a token was chosen from
SIZES = {"kv_slots": MAX_SLOTS, "kv_slot_size": 1 << 32}  # facts that views calculate with, and their limits
SIZES |= dict.fromkeys(("expert_bytes", "expert_cache_bytes", "experts_total_bytes"), 1 << 62)
SNAPSHOT = {"resident", "pinned", "ahead", "slots"}
BAD = (KeyError, TypeError, ValueError, OverflowError, IndexError)


def why(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)[:160]


def number(facts: Facts, name: str, most: int) -> int:
    value = facts[name]
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, not {str(value)[:40]}")
    return value


def check_sizes(facts: Facts) -> None:
    """ValueError unless the sizes among an engine's facts are sizes."""
    for name, most in SIZES.items():
        if facts.get(name) is not None:
            number(facts, name, most)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")


def objects(path: Path) -> Iterator[tuple[int, Facts | None, str]]:
    """(line number, object or None where it is not one, why)."""
    with open(path, "rb") as file:
        at = 0
        while raw := file.readline(MAX_LINE + 1):
            at += 1
            if len(raw) > MAX_LINE:
                yield at, None, f"longer than {MAX_LINE} bytes"
                return
            why = "cut in the middle of a line" if not raw.endswith(b"\n") else "not a JSON object"
            try:
                found = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
                if b"\\u" in raw:  # the only way to a lone surrogate, which is no text
                    json.dumps(found, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                found = None
            yield at, found if isinstance(found, dict) and raw.endswith(b"\n") else None, why


def header(path: Path, found: Facts | None) -> Facts:
    if found is None or found.get("format") != FORMAT:
        raise TraceError(f"{path}: not a trace: the first line must be a {FORMAT} header, as Recorder writes it")
    if found.get("version") not in range(1, VERSION + 1):
        raise TraceError(f"{path}: trace version {str(found.get('version'))[:20]}, this build reads 1 to {VERSION}")
    if not isinstance(found.get("engine"), dict):
        raise TraceError(f"{path}: header: engine must be an object")
    try:
        for name, most in LIMITS.items():
            number(found, name, most)
        for other, many in (("experts", 1 << 22), ("top_k", 1 << 16)):
            if found["layers"] * found[other] > many:
                raise ValueError(f"layers times {other} must be at most {many}")
        check_sizes(found["engine"])
    except (KeyError, ValueError) as error:
        raise TraceError(f"{path}: header: {why(error)}") from None
    return found


def names(found: Facts, known: list[str]) -> list[str]:
    """More names of gauges; ValueError unless they are new, short and few."""
    new = found["names"]
    if not isinstance(new, list) or not all(isinstance(n, str) and 0 < len(n) <= MAX_NAME for n in new):
        raise ValueError(f"names must be a list of 1 to {MAX_NAME} characters each")
    if len(known) + len(new) > GAUGES:
        raise ValueError(f"more than {GAUGES} names of gauges")
    if len({*known, *new}) < len(known) + len(new):
        raise ValueError("a name of a gauge is there twice")
    return new


def sample(found: Facts, known: int) -> tuple[int, np.ndarray]:
    """(t_ns, values) of a gauge; ValueError unless there is a number or null for each known name."""
    values = found["value"]
    if not isinstance(values, list) or len(values) != known:
        raise ValueError(f"value must be a list of {known} numbers, one for each name so far")
    if not all(v is None or (type(v) in (int, float) and abs(v) < 1e300) for v in values):
        raise ValueError("value must hold numbers and null alone")
    return number(found, "t_ns", 1 << 63), np.array(values, "f8")  # null reads as nan


def choice(value: Any) -> Choice:
    """A token that could be chosen; ValueError unless it is [id, text, logprob]."""
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("a choice must be [id, text, logprob]")
    id, text, logprob = value
    if type(id) is not int or not 0 <= id < 1 << 31 or not isinstance(text, str) or len(text) > MAX_NAME:
        raise ValueError(f"a choice must begin with a token id and at most {MAX_NAME} characters of text")
    if type(logprob) not in (int, float) or not -1e30 < logprob <= 0:
        raise ValueError("a choice's logprob must be a number of at most 0")
    return id, text, float(logprob)


def choices(value: Any) -> list[Choice]:
    """ValueError unless it is a list of at most MAX_CHOICES."""
    if not isinstance(value, list) or len(value) > MAX_CHOICES:
        raise ValueError(f"best must be a list of at most {MAX_CHOICES} choices")
    return [choice(one) for one in value]


def check_snapshot(value: Any, header: Facts) -> None:
    """ValueError unless a snapshot's experts and slots are those of the header's model."""
    cells, layers = header["layers"] * header["experts"], header["layers"]
    limits = (MAX_SLOTS, 1 << 32, layers, 1 << 31, 1 << 62)
    if not isinstance(value, dict) or not isinstance(value.get("slots"), list) or not (value.keys() <= SNAPSHOT):
        raise ValueError(f"a snapshot must have {', '.join(sorted(SNAPSHOT))}")
    for name in ("resident", "pinned", *(value.keys() & {"ahead"})) if "resident" in value else ():
        if not isinstance(value[name], list) or not all(type(v) is int and 0 <= v < cells for v in value[name]):
            raise ValueError(f"snapshot: {name} must be numbers below {cells}")
    for row in value["slots"]:
        if not isinstance(row, list) or len(row) != len(limits) or not all(type(v) is int for v in row):
            raise ValueError("snapshot: a slot must be five whole numbers")
        if not all((-1 if i == 3 else 0) <= v < most for i, (v, most) in enumerate(zip(row, limits, strict=True))):
            raise ValueError(f"snapshot: slot {row[0]} has numbers that no slot of this model has")
