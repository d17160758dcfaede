"""A token's route as one picture: a row for each layer, a column for each expert, what the router thought of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_lab.view import palette
from colibri_lab.view.html import percent
from colibri_lab.view.svg import STYLE, boxes, image, panel, text

LEFT, MOST = 54.0, 22.0


class Route:
    """title; logits [L][E] of the routers (none of a layer without one); chosen [L][k] experts, best first; their
    weights [L][k]. Brightness is the softmax of a layer's logits, a ring marks who was chosen."""

    def __init__(self, title: str, logits: Sequence[NDArray[np.float32]], chosen: Sequence[NDArray[np.int32]],
                 weights: Sequence[NDArray[np.float32]]) -> None:  # fmt: skip
        if not len(logits) == len(chosen) == len(weights):
            raise ValueError(f"{len(logits)} layers of logits, {len(chosen)} of experts, {len(weights)} of weights")
        self.title, self.chosen, self.weights = title, [c.tolist() for c in chosen], [w.tolist() for w in weights]
        self.shares = [_softmax(row) for row in logits]

    def _repr_html_(self) -> str:
        experts, layers = max((len(row) for row in self.shares), default=0), len(self.shares)
        wide, high = min(46.0, 640.0 / max(experts, 1)), max(4.0, min(MOST, 480.0 / max(layers, 1)))
        gap = 2.0 if wide > 12 and high > 10 else 0.5
        side = LEFT + experts * wide + 12
        parts, peak = [], max((float(row.max()) for row in self.shares if len(row)), default=1.0)
        for m, row in enumerate(self.shares):
            top = m * high
            if m % max(1, -(-13 // int(high))) == 0:
                parts.append(text(0, top + high / 2 + 3, f"layer {m}"))
            for e, share in enumerate(row.tolist()):
                colour = palette.CIVIDIS[min(63, int(63 * share / peak))]
                parts.append(boxes(colour, [(LEFT + e * wide, top, wide - gap, high - gap)]))
            for e in self.chosen[m]:
                x, w, h = LEFT + e * wide + 1, wide - gap - 2, high - gap - 2
                ring = f"fill='none' stroke='{palette.MARK}' stroke-width='2'"
                parts.append(f"<path {ring} d='M{x:.4g} {top + 1:.4g}h{w:.3g}v{h:.3g}h-{w:.3g}z'/>")
            if high > 10:
                pairs = zip(self.chosen[m], self.weights[m], strict=True)
                words = ", ".join(f"{e} ({percent(w)})" for e, w in pairs)
                parts.append(text(side, top + high / 2 + 3, words or "dense", "class='fg'"))
        every = next((n for n in (1, 2, 4, 8, 16, 32) if n * wide > 22), 64)
        middle = "text-anchor='middle'"
        for e in range(0, experts, every):
            parts.append(text(LEFT + (e + 0.5) * wide - gap / 2, layers * high + 13, e, middle))
        label = f"{self.title}: the experts of {layers} layers"
        keys = [(f"{percent(peak)} of the router's trust", palette.CIVIDIS[63]), ("0 %", palette.CIVIDIS[0])]
        keys.append(("one of the token's experts (ring)", palette.MARK))
        body = image(side + 220, layers * high + 18, label, parts)
        return (
            f"<div class='clr'><style>{STYLE}</style>{panel(self.title, 'experts and their weights', body, keys)}</div>"
        )

    def __repr__(self) -> str:
        return f"<Route {self.title}: {len(self.shares)} layers>"


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    if not len(logits):
        return logits
    powers = np.exp(logits - logits.max())
    shares: NDArray[np.float32] = powers / powers.sum()
    return shares
