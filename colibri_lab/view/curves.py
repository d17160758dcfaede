"""Lines over numbers as one SVG: miss-ratio curves and the like, for notebooks and pages without a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from colibri_lab.view import palette
from colibri_lab.view.html import Still
from colibri_lab.view.svg import STYLE, panel

WIDTH, HEIGHT, LEFT, BOTTOM = 640.0, 240.0, 46.0, 34.0


class Curves(Still):
    """y of each named line at the places `x`, both growing from 0; y is a share, written in per cent.

    mark: (x, y, words) of one place that stands out.
    """

    def __init__(self, title: str, x_name: str, x: Sequence[float], lines: Mapping[str, Sequence[float]],
                 mark: tuple[float, float, str] | None = None) -> None:  # fmt: skip
        for name, values in lines.items():
            if len(values) != len(x):
                raise ValueError(f"{name}: {len(values)} values for {len(x)} places")
        self.title, self.x_name, self.x = title, x_name, list(x)
        self.lines = {name: list(values) for name, values in lines.items()}
        self.mark = mark

    def _repr_html_(self) -> str:
        most_x = max(self.x, default=1.0) or 1.0
        most_y = max((v for values in self.lines.values() for v in values), default=1.0) or 1.0
        # lines often end in the same value: the legend tells them apart where they differ
        middle = min(range(len(self.x)), key=lambda i: abs(self.x[i] - most_x / 2), default=0)
        parts, keys = [], []
        for quarter in range(5):
            y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 8) * quarter / 4
            parts.append(f"<path class='line' d='M{LEFT} {y:.4g}h{WIDTH - LEFT:g}v1h-{WIDTH - LEFT:g}z'/>")
            label = f"{100 * most_y * quarter / 4:.0f} %"
            parts.append(f"<text x='{LEFT - 5:g}' y='{y + 4:.4g}' text-anchor='end'>{label}</text>")
        free = 0.0  # labels that would touch the one before are left out
        for at in self.x:
            x = LEFT + (WIDTH - LEFT - 12) * at / most_x
            if x < free:
                continue
            free = x + 26
            parts.append(f"<text x='{x:.4g}' y='{HEIGHT - BOTTOM + 14:g}' text-anchor='middle'>{at:g}</text>")
        parts.append(f"<text x='{LEFT:g}' y='{HEIGHT - 4:g}'>{escape(self.x_name)}</text>")
        for i, (name, values) in enumerate(self.lines.items()):
            colour, dash = palette.OKABE_ITO[i % 8], "" if i < 8 else " stroke-dasharray='4 3'"
            across, up = (WIDTH - LEFT - 12) / most_x, (HEIGHT - BOTTOM - 8) / most_y
            points = " ".join(
                f"{LEFT + across * a:.4g},{HEIGHT - BOTTOM - up * v:.4g}" for a, v in zip(self.x, values, strict=True)
            )
            parts.append(f"<polyline fill='none' stroke='{colour}' stroke-width='2'{dash} points='{points}'/>")
            keys.append((f"{name} {100 * values[middle]:.1f} % at {self.x[middle]:g}" if values else name, colour))
        words = ""
        if self.mark and self.lines:
            x, y = LEFT + (WIDTH - LEFT - 12) * self.mark[0] / most_x, HEIGHT - BOTTOM
            up = (HEIGHT - BOTTOM - 8) * self.mark[1] / most_y
            words, colour, style = self.mark[2], palette.MARK, "fill='none' stroke-width='3'"
            parts.append(f"<circle cx='{x:.4g}' cy='{y - up:.4g}' r='6' stroke='{colour}' {style}/>")
            keys.append((f"○ {words}", colour))
        label = escape(f"{self.title}: {', '.join(self.lines)} over {self.x_name}. {words}".rstrip(". "), True)
        image = f"<svg viewBox='0 0 {WIDTH:g} {HEIGHT:g}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"
        return f"<div class='clr'><style>{STYLE}</style>{panel(self.title, self.x_name, image, keys)}</div>"

    def __repr__(self) -> str:
        return f"<Curves {self.title}: {', '.join(self.lines)}>"
