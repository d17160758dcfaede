"""What a section found, one line each, written down at once: a section that dies leaves what it had."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """least, most: what the value should reach, or stay below; share: of a ceiling that was measured, 0 to 1."""

    what: str
    value: float | int | str | bool | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    share: float | None = None

    @property
    def met(self) -> bool | None:
        """None where nothing was asked for. A share, where there is one, is what `least` is about."""
        value = self.value if self.share is None else self.share
        if self.least is None and self.most is None:
            return None
        if not isinstance(value, (int, float)):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def line(self) -> str:
        shown = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        words = [f"{self.what}: {shown} {self.unit}".rstrip()]
        if self.share is not None:
            words.append(f"{100 * self.share:.1f} % of the ceiling")
        for name, bar in (("at least", self.least), ("at most", self.most)):
            if bar is not None:
                words.append(f"{name} {bar:g}: {'met' if self.met else 'MISSED'}")
        return ", ".join(words)


class Rows:
    """Rows of one section, in DIR/SECTION.jsonl."""

    def __init__(self, folder: Path, section: str) -> None:
        self._path = folder / f"{section}.jsonl"
        self._path.write_text("")

    def __call__(self, what: str, value: Any, unit: str = "", **more: float | None) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(Row(what, value, unit, **more))) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(folder: Path, section: str) -> list[Row]:
    """Whole lines of a section so far; none where it has not begun."""
    path = folder / f"{section}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("}")]


def write(path: Path, text: str) -> None:
    """Under another name first, so that nobody reads half a file."""
    made = path.with_suffix(".new")
    with made.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)
