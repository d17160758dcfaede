"""Counts of prompt steps apart from those of decode steps, without a second set of counters in the hot path."""

from __future__ import annotations

NAMES = ("faults", "hits", "prefetch_hits", "io_wait_s")
Moving = tuple[int, int, int, int]  # faults, hits, prefetch hits, nanoseconds of waiting, of the whole run so far


class PhaseSplit:
    """Looks at the running totals where the phase changes and keeps the differences."""

    def __init__(self) -> None:
        self._decode = False
        self._mark: Moving = (0, 0, 0, 0)
        self._prefill: Moving = (0, 0, 0, 0)

    def enter(self, decode: bool, totals: Moving) -> None:
        """A step of this phase begins."""
        if decode != self._decode:
            self._prefill = self._so_far(totals)
            self._decode, self._mark = decode, totals

    def _so_far(self, totals: Moving) -> Moving:
        if self._decode:
            return self._prefill
        a, b, c, d = (p + t - m for p, t, m in zip(self._prefill, totals, self._mark, strict=True))
        return a, b, c, d

    def counters(self, totals: Moving) -> dict[str, int | float]:
        """prefill_* and decode_* of each name; a step with any prompt row is prefill."""
        prefill = self._so_far(totals)
        out: dict[str, int | float] = {}
        for name, before, all_ in zip(NAMES, prefill, totals, strict=True):
            unit = 1e9 if name == "io_wait_s" else 1
            out[f"prefill_{name}"] = before / unit if unit > 1 else before
            out[f"decode_{name}"] = (all_ - before) / unit if unit > 1 else all_ - before
        return out
