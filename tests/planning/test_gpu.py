"""`colibri-lab plan --gpu`: experts in three tiers, and a token's cost with a card, by arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from colibri_lab.cli import main
from colibri_lab.errors import ConfigError
from colibri_lab.model.families import read_spec
from colibri_lab.model.jsonfile import read_object
from colibri_lab.model.plan import make_plan
from colibri_lab.paths import embedded_model
from colibri_lab.planning import gpu
from colibri_lab.planning.boards import CARDS, Card, Machine
from colibri_lab.planning.cost import PROCESS, READ_S, TOKEN_S, Needs, needs
from colibri_lab.planning.gpu import Tiers, card_of, on_card, tiers

CONFIG = str(embedded_model() / "config.json")
RATES = ["--ram", "100MB", "--dram", "16GB/s", "--disk", "1GB/s"]
HERE = Machine("here", 10e9, 16e9, 2e9, latency=1e-4)
CARD = Card("card", 4.5e9, 1000e9, 20e9)


@pytest.fixture(scope="module")
def need() -> Needs:
    """40 layers with 100 experts of 10 MB each, 4 a token: 40 GB of experts, 1 GB resident, 1 GB of keys and values."""
    layout = make_plan(read_spec(read_object(Path(CONFIG)), CONFIG), "int4", 32)
    return replace(
        needs(layout, 256), dense=10**9, dense_read=700 * 10**6, expert=10**7, experts=4000, uses=160, layers=40,
        sparse=40, least=4, kv=10**9, kv_read=35 * 10**7,
    )  # fmt: skip


def test_tiers_hold_what_is_left(need: Needs) -> None:
    where = tiers(need, HERE, CARD)
    assert where.device == pytest.approx((4.5e9 - gpu.CONTEXT - 2e9) / 40e9)
    assert where.host == pytest.approx((10e9 - 1e9 - PROCESS) / 40e9)
    assert where.disk == pytest.approx(1 - where.device - where.host)
    large = tiers(need, HERE, replace(CARD, memory=100e9))
    assert (large.device, large.host, large.disk) == (1.0, 0.0, 0.0)
    roomy = tiers(need, replace(HERE, ram=200e9), CARD)
    assert roomy.disk == 0.0 and roomy.device + roomy.host == pytest.approx(1.0)


def test_what_must_be_there_and_is_not(need: Needs) -> None:
    with pytest.raises(ConfigError, match=r"card: 0\.04 GB of memory are missing: resident weights take 1\.00 GB"):
        tiers(need, HERE, replace(CARD, memory=2.5e9))
    with pytest.raises(ConfigError, match=r"here: 0\.10 GB of memory are missing"):
        tiers(need, replace(HERE, ram=1e9), CARD)


def test_all_on_the_card_is_a_graph(need: Needs) -> None:
    said = on_card(need, HERE, CARD, Tiers(1.0, 0.0), 1.0, 1.0)
    assert said.seconds["dense"] == pytest.approx(0.7e9 / 700e9)
    assert said.seconds["experts"] == pytest.approx(1.6e9 / 700e9)
    assert said.seconds["kv"] == pytest.approx(0.35e9 / 700e9)
    gaps = (40 * gpu.LAUNCHES + gpu.TOKEN_LAUNCHES) * gpu.GAP_S + TOKEN_S
    assert said.seconds["calls"] == pytest.approx(gaps) and said.seconds["link"] == said.seconds["disk"] == 0
    assert said.bound == "memory" and said.tokens_per_s == said.overlapped == pytest.approx(1 / (2.65e9 / 700e9 + gaps))
    fast = on_card(need, HERE, replace(CARD, dram=1e15), Tiers(1.0, 0.0), 1.0, 1.0)
    assert fast.bound == "calls" and fast.tokens_per_s == pytest.approx(1 / gaps, rel=1e-2)


def test_launches_run_beside_kernels(need: Needs) -> None:
    """Not all experts are on the card, though all that are asked for: no graph, and nothing is sent."""
    launches = (40 * gpu.LAUNCHES + gpu.TOKEN_LAUNCHES) * gpu.LAUNCH_S + TOKEN_S
    said = on_card(need, HERE, CARD, Tiers(0.9, 0.1), 1.0, 1.0)
    assert said.seconds["calls"] == pytest.approx(launches) and launches > 2.65e9 / 700e9
    assert said.bound == "calls" and said.tokens_per_s == pytest.approx(1 / launches)
    slow = on_card(need, HERE, replace(CARD, dram=100e9), Tiers(0.9, 0.1), 1.0, 1.0)
    assert slow.bound == "memory" and slow.tokens_per_s == pytest.approx(70e9 / 2.65e9)


def test_what_is_missing_goes_over_the_link_and_comes_from_the_disk(need: Needs) -> None:
    said = on_card(need, HERE, CARD, Tiers(0.05, 0.2), 0.5, 0.75)
    waits = 40 * (1 - 0.5**4)
    assert said.seconds["link"] == pytest.approx(80 * 1e7 / 20e9 + waits * gpu.SEND_S)
    assert said.seconds["disk"] == pytest.approx(40 * (1e7 / 2e9 + READ_S) + 40 * (1 - 0.75**4) * 1e-4)
    computing = max(sum(said.seconds[part] for part in ("dense", "experts", "kv")), said.seconds["calls"])
    assert said.tokens_per_s == pytest.approx(1 / (said.seconds["link"] + said.seconds["disk"] + computing))
    assert said.bound == "disk" and said.overlapped == pytest.approx(1 / said.seconds["disk"])
    assert said.share == 0.25 and said.hits == 0.75
    assert on_card(need, replace(HERE, disk=1e12), CARD, Tiers(0.05, 0.2), 0.5, 0.75).bound == "link"


def test_cards() -> None:
    assert card_of("h200") is CARDS["h200"] and CARDS["h200"].dram == pytest.approx(0.9 * 4.8e12)
    assert card_of("24GB, 900GB/s, link=25GB/s") == Card("this card", 24e9, 900e9, 25e9)
    for wrong in ("h2000", "24GB,900GB/s", "24GB,900GB/s,25GB/s", "24GB,0,link=1GB", "a,b,link=c"):
        with pytest.raises(ConfigError, match=r"is none of h200, h100, .* nor like 24GB,900GB/s,link=25GB/s"):
            card_of(wrong)


@pytest.mark.parametrize("name", [*CARDS, "600MB,100GB/s,link=10GB/s"])
def test_what_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-config", CONFIG, *RATES, "--gpu", name]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["experts"] == {"device": 1.0, "host": 0.0, "disk": 0.0} and found["hit_rate_device"] == 1.0
    assert found["seconds"]["disk"] == found["seconds"]["link"] == 0 and found["bound"] == "calls"
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "never measured" in out and "the card 8.4 MB (100%)" in out and card_of(name).source in out


def test_a_small_card_shares_with_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    need = ["plan", "--model-config", CONFIG, *RATES[2:], "--ram", "67MB", "--gpu", "510MB,100GB/s,link=10GB/s"]
    assert main([*need, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(0 < found["experts"][tier] < 1 for tier in ("device", "host"))
    assert sum(found["experts"].values()) == pytest.approx(1)
    assert 0 < found["hit_rate_device"] < found["hit_rate"] and found["seconds"]["link"] > 0
    assert main([*need[:-1], "500MB,1GB/s,link=1GB/s"]) == 2
    assert "this card: 0.0" in capsys.readouterr().err
