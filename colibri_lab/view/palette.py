"""Colours that people with any colour vision can tell apart: Okabe-Ito for kinds, Cividis for amounts."""

from __future__ import annotations

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
STAGES = ("#0072B2", "#56B4E9", "#E69F00", "#CC79A7", "#D55E00", "#009E73", "#999999")  # as timeline.STAGES
FAULT, HIT, EVICTED, MEMORY, MARK = "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"

_STOPS: tuple[tuple[int, int, int], ...] = ((0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115))
_STOPS += ((138, 134, 120), (165, 156, 116), (195, 179, 105), (225, 204, 85), (254, 232, 56))


def _cividis(share: float) -> str:
    x = share * (len(_STOPS) - 1)
    i = min(int(x), len(_STOPS) - 2)
    mixed = (round(a + (b - a) * (x - i)) for a, b in zip(_STOPS[i], _STOPS[i + 1], strict=True))
    return "#" + "".join(f"{v:02x}" for v in mixed)


CIVIDIS = tuple(_cividis(i / 63) for i in range(64))
