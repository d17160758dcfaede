"""A token's route as a picture that needs no kernel."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.view.route import Route
from tests.view.test_report import Wellformed


def test_a_route_shows_who_was_chosen() -> None:
    logits = [np.array([0, 3, 1, 2], np.float32), np.zeros(0, np.float32)]
    chosen = [np.array([1, 3]), np.zeros(0, np.int32)]
    weights = [np.array([0.75, 0.25], np.float32), np.zeros(0, np.float32)]
    shown = Route("the <token>", logits, chosen, weights)
    html = shown._repr_html_()
    Wellformed(html)
    assert html.count("stroke-width='2'") == 2 and "1 (75.0 %), 3 (25.0 %)" in html and ">dense<" in html
    assert "the &lt;token&gt;" in html and "2 layers" in repr(shown)
    assert shown.shares[0].sum() == pytest.approx(1) and "64.4 % of the router" in html


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (64, 256)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    layers, experts = shape
    rows = [np.linspace(0, 1, experts, dtype=np.float32)] * layers
    html = Route("t", rows, [np.array([0])] * layers, [np.array([1.0], np.float32)] * layers)._repr_html_()
    Wellformed(html)
    assert html.count("stroke-width='2'") == layers and len(html) < 2_000_000


def test_layers_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="1 layers of logits, 0 of experts"):
        Route("t", [np.zeros(2, np.float32)], [], [])
