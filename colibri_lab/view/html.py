"""A small HTML table for objects that show themselves in a notebook. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Still(ABC):
    """What shows itself as HTML, and where a widget is attached (`live`, its MIME bundle) as that."""

    live: Callable[[], dict[str, Any]] | None = None

    @abstractmethod
    def _repr_html_(self) -> str:
        """The picture of a moment."""

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        moving = {} if self.live is None else self.live()
        return moving | {"text/plain": repr(self), "text/html": self._repr_html_()}


def table(rows: Mapping[str, object], caption: str = "") -> str:
    """Two columns, names and values; everything is escaped, floats get three digits."""
    head = f"<caption style='text-align:left;font-weight:600'>{escape(caption)}</caption>" if caption else ""
    cells = "".join(
        f"<tr><th style='text-align:left;font-weight:400'>{escape(str(name))}</th>"
        f"<td style='text-align:left'>{escape(words(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{head}<tbody>{cells}</tbody></table>"


def grid(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Many columns: the first is text, the others are numbers."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(words(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def words(value: object) -> str:
    """A value for people: – for None, 1,234 for whole numbers, three significant digits for floats."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    if value is None or value != value:
        return "–"
    size = abs(value)
    return f"{value:,.{0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def size(n_bytes: float | None) -> str:
    """Bytes as B, KiB, MiB, GiB or TiB."""
    if n_bytes is None:
        return "–"
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} B" if unit == 0 else f"{number(value)} {_UNITS[unit]}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def duration(ms: float | None) -> str:
    if ms is None:
        return "–"
    return f"{number(ms * 1000)} µs" if ms < 1 else f"{number(ms)} ms" if ms < 1000 else f"{number(ms / 1000)} s"
