"""What a benchmark says: rows in the one JSON form, a table for people, and whether to trust it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

NOISY = 3  # exit code of a benchmark whose figures are not trustworthy


@dataclass(frozen=True)
class Row:
    """One figure. ratio: ours over the peer's, above 1 is better for us. share: the part of `limit` reached, 0 to 1."""

    what: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    limit: float | None = None
    share: float | None = None


@dataclass
class Result:
    """All rows of one run. `reasons` says why it is noisy; empty means that it is not."""

    bench: str
    rows: list[Row] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def noisy(self) -> bool:
        return bool(self.reasons)

    @property
    def exit_code(self) -> int:
        return NOISY if self.noisy else 0

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        peer: str | None = None,
        peer_value: float | None = None,
        limit: float | None = None,
        smaller_is_better: bool = False,
    ) -> None:
        """Append a row; ratio and share are worked out here and nowhere else."""
        ratio = share = None
        if peer_value is not None:
            ratio = peer_value / value if smaller_is_better else value / peer_value
        if limit is not None:
            share = limit / value if smaller_is_better else value / limit
        self.rows.append(Row(what, value, unit, peer, peer_value, ratio, limit, share))

    def to_json(self) -> str:
        """One line: {"bench", "machine", "noisy", "rows"} and, beside them, "reasons" and "notes"."""
        form = {
            "bench": self.bench,
            "machine": machine(),
            "noisy": self.noisy,
            "rows": [{k: _rounded(v) for k, v in asdict(row).items()} for row in self.rows],
            "reasons": self.reasons,
            "notes": self.notes,
        }
        return json.dumps(form, allow_nan=False)

    def show(self, console: Console | None = None) -> None:
        """The same for a person."""
        console = console or Console()
        if not console.is_terminal:  # a file or a pipe has no edge to wrap at
            console.width = 140
        table = Table(title=f"{self.bench} on {machine()['cpu']}", title_justify="left")
        for name in ("what", "ours", "unit", "peer", "peer's", "ratio", "limit", "share"):
            table.add_column(name, justify="left" if name in ("what", "unit", "peer") else "right")
        for row in self.rows:
            numbers = [_short(n) for n in (row.value, row.peer_value, row.ratio, row.limit)]
            share = "" if row.share is None else f"{row.share:.1%}"
            table.add_row(row.what, numbers[0], row.unit, row.peer or "", *numbers[1:], share)
        console.print(table)
        for note in self.notes:
            console.print(f"[dim]{note}[/]")
        for reason in self.reasons:
            console.print(f"[yellow]noisy:[/] {reason}")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "huge_pages": _huge_pages(),
        "load": round(psutil.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _huge_pages() -> str:
    """Which memory gets huge pages (always, madvise, never): it moves memory speed by a fifth."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
