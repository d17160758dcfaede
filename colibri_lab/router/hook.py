"""Run any object with a `select` method as the engine's router, and check what it answers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import RouterError
from ..ops.routing import Routing
from ..ops.types import Rows


class Router(Protocol):
    """What a router does. Raise for logits that it cannot rank; return as many experts a row as the model uses."""

    def select(self, layer: int, logits: NDArray[np.float32]) -> tuple[Any, Any]:
        """logits [R, E] of one layer -> expert ids [R, k], best first, and gate weights [R, k]."""


class RouterHook:
    """Writes a router's choice into the step's rows, in place of the one that the backend made."""

    def __init__(self, router: Router, rows: Rows, audit: Routing | None = None) -> None:
        self._router, self._rows, self._audit = router, rows, audit
        self.name = str(getattr(router, "name", type(router).__name__))

    def apply(self, layer: int, n: int, at: int = 0) -> None:
        """Choose for n rows from `at` on; RouterError names the layer and what is wrong."""
        rows, some = self._rows, slice(at, at + n)
        logits = rows.router_logits[some].copy()  # a router may scribble on what it is given
        answer = self._router.select(layer, logits)
        try:
            ids, weights = (np.asarray(part) for part in answer)
        except (TypeError, ValueError):
            raise RouterError(f"router {self.name}, layer {layer}: answered no pair of (experts, weights)") from None
        shape = rows.experts[some].shape
        if ids.shape != shape or weights.shape != shape:
            raise RouterError(
                f"router {self.name}, layer {layer}: experts {ids.shape} and weights {weights.shape} must be {shape}"
            )
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= logits.shape[1]:
            raise RouterError(
                f"router {self.name}, layer {layer}: experts must be integers from 0 to {logits.shape[1] - 1}"
            )
        ordered = np.sort(ids, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise RouterError(f"router {self.name}, layer {layer}: a row chose an expert twice")
        if weights.dtype.kind not in "fiu" or not np.isfinite(weights).all():
            raise RouterError(f"router {self.name}, layer {layer}: weights must be finite numbers")
        if self._audit is not None:  # the backend's own choice is the exact one
            wrong = (ordered != np.sort(rows.experts[some], axis=1)).any(axis=1)
            self._audit.count(layer, audited=n, wrong_selections=int(wrong.sum()))
        rows.experts[some] = ids
        rows.weights[some] = weights
