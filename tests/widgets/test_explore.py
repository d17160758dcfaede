"""The figure to zoom into shows the view's own columns, sends nothing away, and says when it cannot be made."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from colibri_lab.errors import NotAvailable
from colibri_lab.view.run import RunView
from colibri_lab.widgets.explore import explore
from tests.widgets.fake import FakeEngine


def test_it_shows_the_columns_and_cannot_be_sent_away():
    engine = FakeEngine(3, 6)
    engine.run(40)
    view = RunView.of(engine.telemetry, engine.describe())
    figure = explore(view)
    columns = view.timeline.columns
    bars = {bar.name: np.array(bar.y, float) for bar in figure.data}
    np.testing.assert_allclose(bars["I/O wait"], columns["stages_ns"][:, 4] / 1e6)
    np.testing.assert_array_equal(bars["faults"], columns["faults"])
    np.testing.assert_allclose(bars["read"], columns["bytes_read"] / 2**20)
    assert len(bars) == 10 and len(figure.data[0].x) == len(columns)
    assert "sequence 1, position 7" in figure.data[0].customdata
    assert "sendChartToCloud" in figure._config["modeBarButtonsToRemove"]


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(ValueError, match="no token was generated yet"):
        explore(RunView(1, 2, 1))
    engine = FakeEngine(3, 6)
    engine.run(4)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(NotAvailable, match="pip install 'plotly"):
        explore(RunView.of(engine.telemetry, engine.describe()))
