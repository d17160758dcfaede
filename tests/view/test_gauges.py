"""Series and rates of the engine's counters: what was sampled, by name."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.telemetry import Recorder, Telemetry, replay
from colibri_lab.view.gauges import KEPT, Gauges

S = 10**9


def sampled(*rows):
    telemetry = Telemetry(1, 2, 1)
    for t, counters in rows:
        telemetry.gauges(int(t * S), counters)
    return telemetry


def test_series_and_rates_by_name(tmp_path):
    telemetry = sampled(
        (1, {"pager": {"faults": 10}}),
        (1.5, {"pager": {"faults": 20}, "kv": {"used": 7}}),
        (1.5, {"pager": {"faults": 25}, "kv": {"used": 8}}),
        (3.5, {"pager": {"faults": 65}, "kv": {"used": 6}}),
    )
    gauges = Gauges.of(telemetry)
    assert gauges.seconds.tolist() == [0, 0.5, 0.5, 2.5]
    assert gauges.series("pager.faults").tolist() == [10, 20, 25, 65]
    np.testing.assert_array_equal(gauges.series("kv.used"), [np.nan, 7, 8, 6])
    np.testing.assert_array_equal(gauges.rate("pager.faults"), [np.nan, 20, np.nan, 20])
    assert (gauges.last("kv.used"), gauges.last("kv.none"), len(gauges)) == (6, None, 4)
    assert "kv.used" in gauges and "kv" not in gauges
    assert "pager.faults" in gauges._repr_html_()
    with pytest.raises(KeyError, match=r"no gauge pager.fault; there are pager.faults"):
        gauges.series("pager.fault")
    again = Gauges.of(replay(Recorder(telemetry, tmp_path / "t.jsonl").close()))
    np.testing.assert_array_equal(again.series("kv.used"), gauges.series("kv.used"))


def test_the_newest_are_kept_and_missed_ones_counted():
    telemetry = Telemetry(1, 2, 1)
    gauges, cursor = Gauges(), telemetry.cursor()
    for i in range(3 * KEPT):
        telemetry.gauges(i, {"a": i})
    gauges.take(telemetry.read(cursor))
    assert len(gauges) == KEPT
    assert gauges.missing == 2 * KEPT
    assert gauges.series("a")[-1] == 3 * KEPT - 1


def test_nothing_sampled():
    gauges = Gauges.of(Telemetry(1, 2, 1))
    assert (len(gauges), gauges.seconds.tolist(), gauges.last("a")) == (0, [], None)
    assert "Gauges" in repr(gauges)
