"""What one does with a run on the board: keep and compare; the engine's own figures."""

from __future__ import annotations

import json
import time

import pytest

from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError
from colibri_lab.paths import embedded_model
from colibri_lab.widgets.dashboard import connect, replay
from colibri_lab.widgets.whatif import WhatIf


@pytest.fixture()
def lab():
    with Engine.load(embedded_model(), threads=1, expert_cache_bytes="4MiB", eviction_policy="lru") as engine:
        with connect(engine) as opened:
            yield opened


def press(lab, **content):
    lab.board._handle_custom_msg(content, [])
    lab.board.tick()


def generate(lab):
    lab.generate("The sea was", max_tokens=40, temperature=0.8, seed=5)
    assert lab.wait(60)
    assert lab.error is None


def test_placement_changes_the_hits_and_not_the_text(lab):
    with pytest.raises(ValueError, match="no token was generated yet"):
        lab.keep("A")
    generate(lab)
    a = lab.keep("A")
    pager = lab.engine.counters()["pager"]
    assert a.hit_rate == pager["hits"] / (pager["hits"] + pager["faults"])
    assert a.faults == pager["faults"] and a.bytes_read == pager["bytes_read"]
    assert (a.text, a.tokens, a.prompt) == (lab.text, 40, "The sea was")
    assert a.settings["eviction_policy"] == "lru" and a.settings["threads"] == 1
    assert a.sampling == {"max_tokens": 40, "temperature": 0.8, "seed": 5}
    lab.set("expert_cache_bytes", "1MiB")
    generate(lab)
    b = lab.keep()
    assert b.name == "B" and b.budget_bytes == 1 << 20 < a.budget_bytes
    after = lab.engine.counters()["pager"]
    assert b.faults == after["faults"] - pager["faults"] and b.hit_rate < a.hit_rate
    hits = after["policy_hits"] - pager["policy_hits"]
    assert b.policy_hit_rate == hits / (after["hits"] + after["faults"] - pager["hits"] - pager["faults"])
    both = lab.compare("A", "B")
    assert both.same and "token by token" in both._repr_html_()
    assert ("expert_cache_bytes", "4.00 MiB", "1.00 MiB") in both.settings


def test_the_board_s_buttons(lab):
    generate(lab)
    assert lab.board.study == {}
    press(lab, do="keep", name="")
    press(lab, do="keep", name="second")
    told = lab.board.study
    assert (told["names"], told["a"], told["b"], told["next"]) == (["A", "second"], "A", "second", "B")
    assert "token by token" in told["verdict"] and len(told["rows"]) > 10
    press(lab, do="compare", a="second", b="A")
    assert (lab.board.study["a"], lab.board.study["b"]) == ("second", "A")
    press(lab, do="forget", name="A")
    assert list(lab.runs) == ["second"] and lab.board.study["b"] == ""
    press(lab, do="compare", a="A", b="nobody")
    assert lab.board._trouble.startswith("KeyError: \"no run 'A' is kept")


def test_a_recorded_run_is_kept_the_same(lab, tmp_path):
    with lab.record(tmp_path / "trace.jsonl"):
        generate(lab)
    live = lab.keep("A")
    with replay(tmp_path / "trace.jsonl") as player:
        assert player.keep("A") == live
        press(player, do="keep", name="again")
        assert player.compare().same


def test_what_if_says_the_engine_s_own_rate(lab):
    assert "<svg" in lab.whatif._repr_html_() and not lab.whatif.lines
    generate(lab)
    made, pager = lab.whatif, lab.engine.counters()["pager"]
    rate = pager["hits"] / (pager["hits"] + pager["faults"])
    assert made.mark[:2] == (50.0, rate)
    at = made.x.index(50.0)
    assert made.lines["lru"][at] == rate
    assert made.lines["Belady"][at] > made.lines["Belady, must keep what it reads"][at] > rate
    assert f"engine now: {100 * rate:.1f} %" in made._repr_html_()


def test_what_if_is_worked_out_only_while_somebody_looks(lab):
    generate(lab)
    assert lab.board.whatif == {}
    press(lab, do="watch")
    end = time.monotonic() + 60
    while lab.board.whatif.get("behind") != 0 or None in lab.board.whatif["lines"]["Belady"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    told = lab.board.whatif
    pager = lab.engine.counters()["pager"]
    assert told["rate"] == round(pager["hits"] / (pager["hits"] + pager["faults"]), 4)
    assert told["lines"]["lru"][told["now"]] == told["rate"] and told["experts"][told["now"]] == 64
    assert len(json.dumps(told)) < 2000
    lab.set("expert_cache_bytes", "3MiB")
    until = time.monotonic() + 60
    while lab.board.whatif["experts"][lab.board.whatif["now"]] != 48 or lab.board.whatif["behind"]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_if_of_a_recorded_run(lab, tmp_path):
    with lab.record(tmp_path / "trace.jsonl"):
        generate(lab)
    with replay(tmp_path / "trace.jsonl") as player:
        assert player.whatif.lines == lab.whatif.lines and player.whatif.mark == lab.whatif.mark


@pytest.mark.parametrize(("given", "said"), [({"pin_after_tokens": "x"}, "pin_after_tokens"),
                                             ({"pin_max_share": 7}, "pin_max_share")])  # fmt: skip
def test_a_hostile_trace_is_refused_by_name(lab, given, said):
    about = lab.engine.describe() | {"settings_given": given}
    with pytest.raises(ConfigError, match=f"the recorded settings: {said}"):
        WhatIf(lab.engine.telemetry, about)
    for budget in ("4", -1, 10**30):
        ours = WhatIf(lab.engine.telemetry, lab.engine.describe() | {"expert_cache_bytes": budget})
        ours.feed()
        assert ours.shadow.now in (None, 128)
