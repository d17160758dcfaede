"""Kept runs side by side: a table, what differs in per cent, whether the text is the same; CSV, Parquet, Markdown."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from colibri_lab.errors import NotAvailable
from colibri_lab.export import write
from colibri_lab.view import html
from colibri_lab.view.runs import Run

MOST = 64  # kept at a time; the board shows their names
# field, what people call it, how it is written, which way is better: 1 more, -1 less, 0 neither
FIGURES: tuple[tuple[str, str, Any, int], ...] = (
    ("tokens", "tokens", html.words, 0),
    ("tokens_per_s", "tokens/s", html.number, 1),
    ("p50_ms", "ms a token P50", html.number, -1),
    ("p95_ms", "P95", html.number, -1),
    ("p99_ms", "P99", html.number, -1),
    ("ttft_ms", "time to first token", html.duration, -1),
    ("prompt_tokens_per_s", "prompt tokens/s", html.number, 1),
    ("hit_rate", "expert hits", html.percent, 1),
    ("policy_hit_rate", "hits by policy", html.percent, 0),
    ("pin_hit_rate", "hits by pins", html.percent, 0),
    ("prefetch_hit_rate", "hits by prefetch", html.percent, 0),
    ("faults", "faults", html.words, -1),
    ("bytes_read", "read from disk", html.size, -1),
    ("io_wait_ms", "waited for pages", html.duration, -1),
    ("budget_bytes", "experts in memory", html.size, 0),
)


class Line(NamedTuple):
    """A figure of two runs in words; change: B over A, less one, None where there is no such share."""

    label: str
    a: str
    b: str
    change: float | None
    better: str  # A, B or empty


class Comparison:
    """A beside B. `lines`; `same`: all token ids are equal; `differs`: the first differing character of the texts."""

    def __init__(self, a: Run, b: Run) -> None:
        self.a, self.b = a, b
        self.lines = [_line(a, b, *figure) for figure in FIGURES]
        self.same = a.digest == b.digest
        self.differs = None if self.same else _differs(a.text, b.text)
        keys = sorted({**a.settings, **b.settings})
        pairs = [(key, a.settings.get(key, "default"), b.settings.get(key, "default")) for key in keys]
        self.settings = [(key, _setting(key, x), _setting(key, y)) for key, x, y in pairs if x != y]

    @property
    def verdict(self) -> str:
        """Whether both said the same, in one sentence."""
        if self.same:
            return "the text is the same, token by token"
        if self.differs is None:
            return "the kept text is the same, the tokens are not"
        x, y = (run.text[self.differs : self.differs + 24] for run in (self.a, self.b))
        return f"the text differs from character {self.differs} on: {x!r} and {y!r}"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, A, B, difference) in words: settings that differ, then figures."""
        rows = [(key, x, y, "") for key, x, y in self.settings]
        return rows + [(line.label, line.a, line.b, _said(line)) for line in self.lines]

    def __repr__(self) -> str:
        rows = [("", self.a.name, self.b.name, "difference"), *self.rows()]
        wide = [max(len(row[i]) for row in rows) for i in range(4)]
        text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows)
        return f"{text}\n{self.verdict}"

    def _repr_html_(self) -> str:
        table = html.grid(("", self.a.name, self.b.name, "difference"), self.rows())
        return f"{table}<p>{escape(self.verdict)}</p>"


class Runs:
    """Kept runs by name, oldest first. `runs["A"]` is a Run, `len`, `in` and iteration over names as in a dict."""

    def __init__(self) -> None:
        self._kept: dict[str, Run] = {}

    def add(self, run: Run) -> Run:
        """Keeps it; one of the same name gives way. ValueError for a name that is empty, too long, or one too many."""
        if not run.name.strip() or len(run.name) > 40:
            raise ValueError(f"a run's name has 1 to 40 characters, not {len(run.name.strip())}")
        if run.name not in self._kept and len(self._kept) >= MOST:
            raise ValueError(f"{MOST} runs are kept already; remove one with `del lab.runs[name]`")
        self._kept.pop(run.name, None)
        self._kept[run.name] = run
        return run

    def __getitem__(self, name: str) -> Run:
        if name not in self._kept:
            raise KeyError(f"no run {name!r} is kept: there are {', '.join(self._kept) or 'none yet'}")
        return self._kept[name]

    def __delitem__(self, name: str) -> None:
        del self._kept[self[name].name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def free(self) -> str:
        """The first letter that is no run's name, for a button that asks for none."""
        letters = [chr(65 + i) for i in range(26)]
        return next((name for name in letters if name not in self._kept), f"run {len(self._kept) + 1}")

    def compare(self, a: str | None = None, b: str | None = None) -> Comparison:
        """Two runs side by side; without names the last two. KeyError names those that there are."""
        if a is None or b is None:
            if len(self._kept) < 2:
                raise ValueError("two kept runs are needed: lab.keep(name) keeps the last one")
            a, b = list(self._kept)[-2:]
        return Comparison(self[a], self[b])

    # -- as a file --

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """One row a run, all fields of Run; settings and sampling as JSON. OSError names the path."""
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(_names())
        out.writerows([_plain(getattr(run, name)) for name in _names()] for run in self._kept.values())
        return write(path, text.getvalue().encode())

    def to_markdown(self, path: str | os.PathLike[str]) -> Path:
        """The table as people read it."""
        head = ("run", *(label for _, label, _, _ in FIGURES), "settings")
        rows = [head, ("---", *["---:"] * len(FIGURES), "---"), *self._rows()]
        lines = "".join(f"| {' | '.join(_cell(value) for value in row)} |\n" for row in rows)
        return write(path, lines.encode())

    def to_parquet(self, path: str | os.PathLike[str]) -> Path:
        """Columns as in to_csv. NotAvailable without the package pyarrow (extra `parquet`)."""
        try:
            arrow: Any = importlib.import_module("pyarrow")
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise NotAvailable(
                "to_parquet needs pyarrow: pip install 'colibri-lab[parquet]'; to_csv does not"
            ) from None
        columns = {name: [_plain(getattr(run, name)) for run in self._kept.values()] for name in _names()}
        held = io.BytesIO()
        parquet.write_table(arrow.table(columns), held)
        return write(path, held.getvalue())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (run.name, *(words(getattr(run, name)) for name, _, words, _ in FIGURES), _settings(run))
            for run in self._kept.values()
        ]

    def __repr__(self) -> str:
        if not self._kept:
            return "<no runs kept: lab.keep(name) keeps the last one>"
        shown = (f"{run.name}: {html.number(run.tokens_per_s)} tokens/s" for run in self._kept.values())
        return f"<kept runs: {', '.join(shown)}>"

    def _repr_html_(self) -> str:
        if not self._kept:
            return f"<p>{escape(repr(self)[1:-1])}</p>"
        return html.grid(("run", *(label for _, label, _, _ in FIGURES), "settings"), self._rows())


def _names() -> list[str]:
    return [field.name for field in fields(Run)]


def _plain(value: Any) -> Any:
    """Numbers, texts and None as they are; all else as JSON."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _cell(value: str) -> str:
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _settings(run: Run) -> str:
    return ", ".join(f"{key} {_setting(key, value)}" for key, value in run.settings.items()) or "defaults"


def _setting(key: str, value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return html.size(value) if number and key.endswith("_bytes") else str(value)


def _line(a: Run, b: Run, name: str, label: str, words: Any, better: int) -> Line:
    x, y = getattr(a, name), getattr(b, name)
    change = y / x - 1 if x and y is not None else None
    ahead = "" if not change or not better else "B" if change * better > 0 else "A"
    return Line(label, words(x), words(y), change, ahead)


def _said(line: Line) -> str:
    return "" if line.change is None else "same" if line.change == 0 else f"{100 * line.change:+.1f} %"


def _differs(a: str, b: str) -> int | None:
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)
