"""What is pointed at, exactly; guesses by token."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.events import PageKind, SlotKind
from colibri_lab.telemetry import Telemetry
from colibri_lab.view.detail import detail
from colibri_lab.view.report import performance
from colibri_lab.view.run import RunView
from colibri_lab.view.svg import experts_panel
from colibri_lab.view.timeline import percentiles
from tests.view.whole import picture

MS = 10**6


def told():
    telemetry = Telemetry(2, 4, 1)
    telemetry.page(1 * MS, PageKind.FAULT, 1, 3, 1, 0, 0)
    telemetry.page(2 * MS, PageKind.FAULT, 1, 3, 1, 0, 0)
    telemetry.slot(2 * MS, SlotKind.ALLOC, 0, 5, 1, 3)
    telemetry.slot(2 * MS, SlotKind.ALLOC, 1, 5, 0, -1)
    telemetry.slot(2 * MS, SlotKind.ALLOC, 2, 5, 0, 1)
    telemetry.slot(2 * MS, SlotKind.FREE, 2, 5, 0, 1)
    step(telemetry, 302 * MS, 5, 0)
    return telemetry


def step(telemetry, t, sequence, position, phase=1):
    row = ([sequence], [position], [7], phase, MS, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0)
    telemetry.step(t, *row, np.array([[[1], [3]]], "u2"), np.ones((1, 2, 1), "f2"), np.array([[1, 0]]))


def test_an_expert_and_a_slot_in_figures():
    view = RunView.of(told(), {"kv_slots": 4, "kv_slot_size": 16})
    at = {"kind": "expert", "layer": 1, "expert": 3}
    assert detail(view, at | {"do": "point"}) == at | {"share": 1.0, "faults": 2, "since": 0.3}
    at = {"kind": "expert", "layer": 0, "expert": 0}
    assert detail(view, at) == at | {"share": 0.0, "faults": 0, "since": None}
    at = {"kind": "slot", "slot": 0}
    owner = {"sequence": 5, "layer": 1, "owner": 3, "tokens": 1, "size": 16}
    assert detail(view, at) == at | owner
    assert detail(view, {"kind": "slot", "slot": 1})["owner"] is None, "shared"
    assert detail(view, {"kind": "slot", "slot": 2}) == {"kind": "slot", "slot": 2, "free": True}


@pytest.mark.parametrize("asked", [{}, {"kind": "expert"}, {"kind": "expert", "layer": 2, "expert": 0},
                                   {"kind": "expert", "layer": "0", "expert": -1}, {"kind": "slot", "slot": 4},
                                   {"kind": "slot", "slot": 1.5}, {"kind": "token", "slot": 0}])  # fmt: skip
def test_what_is_not_there_is_not_told(asked):
    assert detail(RunView.of(told(), {"kv_slots": 4}), asked) == {}


@pytest.mark.parametrize("late", [False, True])
def test_guesses_belong_to_the_token_that_ends_after_them(late):
    """late: a token's row is read before what became of its guesses."""
    telemetry = Telemetry(2, 4, 1)
    view, cursor = RunView(2, 4, 1, {}), telemetry.cursor()
    for i in range(3):
        if late:
            step(telemetry, (10 * i + 9) * MS, 0, i)
            view.drain(telemetry, cursor)
        for _ in range(i):
            telemetry.page((10 * i + 2) * MS, PageKind.PREFETCH, 0, 1, 1, 0, i)
        telemetry.page((10 * i + 9) * MS, PageKind.WASTE, 1, 2, 1, 0, i)
        view.drain(telemetry, cursor)
        if not late:
            step(telemetry, (10 * i + 9) * MS, 0, i)
    telemetry.page(40 * MS, PageKind.WASTE, 1, 2, 1, 0, 3)  # after the last token: not known whose
    view.drain(telemetry, cursor)
    assert view.timeline.columns["guessed"].tolist() == [0, 1, 2]
    assert view.timeline.columns["wasted"].tolist() == [1, 1, 1]
    assert picture(view)[1]["count"][:, 3:].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert view.experts.resident.tolist() == [[False, True, False, False], [False] * 4], "a wasted guess never was in"


def test_the_layer_that_faults_most_is_named():
    view = RunView.of(told())
    assert performance(view)["most faults"] == "layer 1: 2 (100.0 %)"
    assert performance(RunView(2, 4, 1))["most faults"] is None
    assert ">faults</text>" in experts_panel(view) and ">2</text>" in experts_panel(view)


@pytest.mark.parametrize("n", [1, 2, 3, 100, 5000])
def test_percentiles_are_numpy_s(n):
    values = np.random.default_rng(n).lognormal(0, 1, n)
    assert percentiles(np.sort(values), (0, 50, 95, 99, 100)) == np.percentile(values, (0, 50, 95, 99, 100)).tolist()
