"""One small model through all routers on the card, for a tool that watches: python -m tests.gpu.sanitized."""

from __future__ import annotations

from dataclasses import replace

from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.routing import KINDS, Routing
from colibri_lab.paths import embedded_model
from tests.cuda.sanitized import SHAPES
from tests.cuda.whole import WholeBound
from tests.ops.models import make

from .machine import Machine, card
from .shapes import LARGE

STEPS = ([(0, 3), (1, 4), (1, 7), (2, 5), (0, 9)], [(0, 2)])
WHOLE = ([(0, 6), (2, 1), (1, 8)], [(2, 3), (0, 4), (1, 5)])  # launch by launch and captured, then replayed


def run(machine: Machine) -> int:
    """How many steps ran."""
    shape = SHAPES["small"]
    weights, pages = make(shape, 3)
    for kind in KINDS:
        with machine.device() as device:
            routing = Routing.make(len(weights.layers), kind, audit=True)
            bound = WholeBound(CudaBackend(device), shape, model=(replace(weights, routing=routing), pages))
            for step in STEPS:
                bound.step(step)
            bound.bring()
            for step in WHOLE:
                bound.step_whole(step)
    return len(KINDS) * (len(STEPS) + len(WHOLE))


if __name__ == "__main__":
    print(f"{run(card(LARGE, embedded_model(), {}))} steps")
