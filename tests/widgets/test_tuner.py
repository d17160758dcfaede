"""The tuner shows what the schema says and writes what the engine takes; what it refuses is said in its own words."""

from __future__ import annotations

import pytest

from colibri_lab.config import EVICTION, PREFETCH, Config
from colibri_lab.engine.engine import Engine
from colibri_lab.paths import embedded_model
from colibri_lab.view.frame import unpack
from colibri_lab.widgets.dashboard import connect


@pytest.fixture(scope="module")
def lab():
    with Engine.load(embedded_model(), threads=1, expert_cache_bytes="4MiB") as engine, connect(engine) as opened:
        yield opened


def tune(lab, name, value):
    lab.board._handle_custom_msg({"do": "tune", "name": name, "value": value}, [])
    lab.board.tick()
    return lab.board.tuned["values"], lab.board.tuned["wrong"]


def test_every_live_key_has_a_control_and_every_other_is_listed(lab):
    told = lab.board.tuner
    assert tuple(item["name"] for item in told["live"]) == Config.live_keys()
    assert {name for name, _, _ in told["fixed"]} == set(Config.model_fields) - set(Config.live_keys())
    items = {item["name"]: item for item in told["live"]}
    assert items["eviction_policy"]["options"] == list(EVICTION)
    assert set(items["prefetcher"]["options"]) > set(PREFETCH)
    assert (items["prefill_chunk"]["range"], items["prefill_chunk"]["default"]) == ("1 to 4,096", "64")
    assert items["expert_cache_bytes"]["range"] == "128 KiB to 8.00 MiB"
    assert items["pace"]["range"].startswith("above 0") and items["pace"]["unit"] == "tokens/s"
    assert items["batch_adapt_interval_ms"]["range"] == "from 1"


def test_a_page_is_told_which_of_its_messages_were_heard(lab):
    for i in range(40):
        message = {"do": "tune", "name": "prefill_chunk", "value": "4097" if i % 2 else "32", "mark": f"page{i}"}
        lab.board._handle_custom_msg(message, [])
        lab.board.tick()
        told = lab.board.tuned
        assert told["heard"][-1] == f"page{i}" and len(told["heard"]) <= 16
        assert list(told["wrong"]) == ["prefill_chunk"][: i % 2] and told["values"]["prefill_chunk"] == "32"
    tune(lab, "prefill_chunk", "64")
    assert lab.board.tuned["heard"][-1] == "page39", "who gives no mark is not told of one"


@pytest.mark.parametrize(
    ("name", "text", "value", "shown"),
    [
        ("eviction_policy", "slru", "slru", "slru"),
        ("prefetcher", "next_gate+history", "next_gate+history", "next_gate+history"),
        ("expert_cache_bytes", "2 MiB", 2 << 20, "2.00 MiB"),
        ("expert_cache_bytes", "1048576", 1 << 20, "1.00 MiB"),
        ("max_batch_size", "3", 3, "3"),
        ("prefill_chunk", "17", 17, "17"),
        ("pace", "40", 40.0, "40"),
        ("pace", "off", None, "none"),
        ("batch_adapt_interval_ms", "500", 500, "500"),
        ("batch_adapt_interval_ms", "", None, "none"),
    ],
)
def test_a_value_reaches_the_engine_and_comes_back(lab, name, text, value, shown):
    tuned, wrong = tune(lab, name, text)
    assert getattr(lab.engine.settings, name) == value
    assert tuned[name] == shown and wrong == {}
    assert f"{name} {shown}" in repr(lab.tuner) or name == "expert_cache_bytes"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("max_batch_size", "9", "can be at most 8, its value at load"),
        ("max_batch_size", "many", "max_batch_size"),
        ("prefill_chunk", "0", "prefill_chunk"),
        ("pace", "-1", "pace"),
        ("eviction_policy", "fifo", "neither lru, lfu"),
        ("expert_cache_bytes", "4 parsecs", "expert_cache_bytes"),
        ("threads", "2", "fixed when the model is loaded"),
        ("treads", "2", "did you mean threads?"),
    ],
)
def test_what_is_refused_is_said_and_changes_nothing(lab, name, text, said):
    before = lab.engine.settings.as_dict()
    _, wrong = tune(lab, name, text)
    assert said in wrong[name]
    assert lab.engine.settings.as_dict() == before and lab.error is None
    assert unpack(lab.board.frame)[0]["error"] is None, "it stands beside the field"
    tune(lab, name, str(before.get(name)))
    lab.tuner.wrong = {}


def test_as_a_table(lab):
    html = lab.tuner._repr_html_()
    assert html.count("<table>") == 2 and "io_threads" in html and "set when an engine is loaded" in html
