"""The engine samples its own counters: rarely, between steps, and when the last request has ended."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

import colibri_lab
from colibri_lab.convert import convert
from colibri_lab.engine.sampler import EVERY_NS, Sampler
from colibri_lab.telemetry import NullTelemetry, Telemetry
from colibri_lab.view.gauges import Gauges
from colibri_lab.view.run import RunView
from tests.makers import make


@pytest.fixture(scope="module")
def engine():
    with colibri_lab.load(colibri_lab.embedded_model(), threads=1, expert_cache_bytes="2MiB") as loaded:
        yield loaded


def flat(counters, before=""):
    for name, value in counters.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def test_the_last_sample_is_what_the_counters_say(engine):
    list(engine.generate_batch(["Once", "12 + 30 ="], max_tokens=20))
    gauges, counters = Gauges.of(engine), dict(flat(engine.counters()))
    assert set(gauges.names) == set(counters)
    told = ("telemetry.events", "telemetry.dropped")  # the sample itself is an event
    assert {name: gauges.last(name) for name in counters if name not in told} == {
        name: value for name, value in counters.items() if name not in told
    }
    assert gauges.last("engine.running") == gauges.last("engine.waiting") == 0
    assert gauges.series("engine.running").max() <= 2


def test_samples_are_rare_and_rates_are_the_engines(engine):
    before = engine.counters()["engine"]["steps"]
    seen = len(Gauges.of(engine))
    engine.settings.pace = 100
    time.sleep(EVERY_NS / 1e9)
    begin = time.monotonic()
    list(engine.generate("The young lady", max_tokens=60))
    seconds = time.monotonic() - begin
    engine.settings.pace = None
    gauges = Gauges.of(engine)
    assert 2 <= len(gauges) - seen <= seconds * 1e9 / EVERY_NS + 3, f"{seconds:.2f} s of running"
    steps = gauges.series("engine.steps")[seen:]
    assert steps[0] == before and steps[-1] - before >= 60, "from before the first step to after the last"
    assert (np.diff(gauges.t_ns[seen:-1].astype("i8")) >= EVERY_NS).all()
    rate = np.median(gauges.rate("engine.decode_tokens")[seen + 1 :])
    assert rate == pytest.approx(60 / seconds, rel=0.5) and rate < 150


def test_a_cancelled_request_ends_with_a_sample(engine):
    stream = engine.generate("The", max_tokens=500)
    next(stream)
    stream.close()
    assert Gauges.of(engine).last("engine.sequences_finished") == engine.counters()["engine"]["sequences_finished"]


def test_without_telemetry_nothing_is_counted_up():
    sampler = Sampler(lambda: pytest.fail("nobody looks"), list)
    sampler.sample(NullTelemetry(1, 1, 1), 5)
    assert sampler.due_ns == 5 + EVERY_NS


def test_an_engine_that_is_gone_is_not_asked():
    telemetry = Telemetry(1, 1, 1)
    Sampler(lambda: None, list).sample(telemetry, 5)
    assert len(Gauges.of(telemetry)) == 0


def test_what_is_wrong_with_the_logits_is_noted_once(tmp_path):
    made = make("mixtral", 6)
    for name, tensor in made.tensors.items():
        if name.endswith("gate.weight"):
            tensor *= 1e4  # past what 8 bits tell apart
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    with colibri_lab.load(path, threads=1, router="int8_lut") as engine:
        cursor = engine.telemetry.cursor()
        list(engine.generate([3, 4, 5], max_tokens=20))
        warnings = [layer["warning"] for layer in engine.describe()["router_layers"] if layer["warning"]]
        told = [value for key, value, _ in engine.telemetry.read(cursor).notes if key == "router_warnings"]
        view = RunView.of(engine.telemetry)
    assert warnings and told[-1] == view.warnings == warnings
    assert all(before != after for before, after in pairwise(told)), "only what is new is noted"
    assert "raise router_quant_bits" in view.warnings[0]
