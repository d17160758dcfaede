r"""two_stage: integer logits choose candidates, float logits of the candidates alone choose experts. Exact.

**The bound.** Gate row w and hidden state x [H] are rounded to integers, w = s q + r and x = t p + u, with steps s,
t, codes q, p and remainders r, u. The integer logit is a = s t (q . p), an exact integer sum times a factor. Then

    w . x - a = (s q + r) . x - s q . t p = r . x + s q . u,

and by Cauchy and Schwarz |w . x - a| <= |r| |x| + |s q| |u| (2-norms). |r| and |s q| are computed once from the
weights, |x| and |u| once for a row. The exact router does not rank w . x but its float32 sum fl(w . x), whose error,
in whatever order it is added up, is at most g sum |w_i x_i| <= g |w| |x| with g = (H + 2) e / (1 - (H + 2) e), e =
2^-24. So

    |fl(w . x) - a| <= B = (|r| + g |w|) |x| + |s q| |u|.

Each norm is rounded up by more than the rounding errors of its own computation, B by 2^-20 of |a| + B for the rest,
and by (H + 4) 2^-148 for products below the smallest normal float.

**The certificate.** Let T be the k-th largest of a_e - B_e. At least k experts have float logits of T or more. An
expert with a_e + B_e < T has a smaller float logit than each of these, so it is not among the k best, whatever the
ties. The others are the candidates; they hold the k best for sure, and choosing among their float logits, with the
same sums in the same order, is choosing among all. Ids, weights and tokens equal softmax's bit for bit.

**The fallback.** When more than half of the experts are candidates (and more than k), scoring them saves nothing: all
are scored, which is softmax. So are rows whose |x| or |w| |x| is so small or large that the float analysis does not
hold; gate rows that are not finite are always candidates. Where the model does not divide by the chosen ones' sum,
the sum over all experts needs every logit; the certificate then only names the candidates early, and `scored` says
it.

**Early.** Of the first stage's integers come also k ids a row, those with the largest a_e - B_e: candidates all of
them, and where k candidates are left the choice itself. A step with many rows lets their reads begin before the
second stage (`pager/early.py`).

Counters: certified, fallback (rows), candidates (experts, certified rows), scored (float logits computed).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ops import route
from ..ops.routing import default_bits, gate_codes


class TwoStage:
    """The reference for one layer's gate [E, H]; `router: two_stage` runs the same in the kernels."""

    def __init__(self, gate: NDArray[np.float32], top_k: int, normalise: bool, bits: int | None = None) -> None:
        self.gate, self.top_k, self.normalise = gate, top_k, normalise
        self.bits = bits or default_bits(len(gate))
        self.codes = gate_codes(gate, self.bits)

    def choose(self, x: NDArray[np.float32]) -> route.Choice:
        """x [H] -> experts, weights and what was counted. route.NotFinite when there is no right choice."""
        return route.two_stage(self.gate, self.codes, x, self.top_k, self.normalise, self.bits)[0]
