"""Experts on the device: who is there, what is sent when, in which order, and that none of it changes a token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.errors import ConfigError, RequestError
from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.cuda_experts import Sharing
from colibri_lab.ops.device import Device
from colibri_lab.ops.driver_cupy import CupyDriver
from colibri_lab.ops.simulator import SimDevice, SimulatedFault
from colibri_lab.ops.tier import Tier
from tests.ops.models import Bound, Shape, make
from tests.parity.models import engine, greedy, logits

from .card import LATE, Card, CUDARuntimeError, plug_in

PROMPT = [5, 9, 33, 2, 60, 17, 8]
EXPERT = 1 << 16  # bytes of an expert of the models here


def test_the_longest_unused_leaves_pinned_ones_last() -> None:
    tier = Tier(3, 0)
    runs = [tier.admit(key, ()) for key in (1, 2, 3)]
    assert runs == [0, 1, 2] and tier.find(1, ()) == 0
    tier.pin(2, True)
    assert tier.admit(4, ()) == 2 and list(tier.held) == [2, 1, 4]  # 3 left: 2 is pinned
    assert tier.admit(5, {1}) == 2  # 4 left: 1 is in use
    tier.pin(2, False)
    assert tier.admit(6, ()) == 1
    with pytest.raises(LookupError, match="in use"):
        tier.admit(7, {1, 5, 6})
    assert tier.counters() == {
        "experts_hits": 1, "experts_faults": 6, "experts_evictions": 3, "experts_ahead": 0, "experts_ahead_hits": 0,
        "experts_ahead_wasted": 0, "experts_resident": 3, "experts_capacity": 3, "experts_pinned": 0,
    }  # fmt: skip


def test_a_guess_takes_no_place_of_what_was_asked_for() -> None:
    tier = Tier(4, 2)
    assert tier.guess(9) is None, "nobody guesses"
    tier.guesses(True)
    held = [tier.admit(key, ()) for key in (1, 2, 3)]
    assert list(tier.held) == [2, 3] and len(set(held)) == 2
    first, second, third = tier.guess(7), tier.guess(8), tier.guess(9)
    assert first == third and {first, second}.isdisjoint(tier.held.values()) and list(tier.guessed) == [8, 9]
    assert tier.guess(8) is None and tier.guess(3) is None
    assert tier.find(8, ()) == second and list(tier.held) == [3, 8] and tier.find(7, ()) is None
    assert (tier.ahead, tier.ahead_hits, tier.ahead_wasted, tier.evictions) == (3, 1, 1, 2)
    tier.guesses(False)
    assert not tier.guessed and [tier.admit(key, ()) for key in (4, 5)] and len(tier.held) == 4


@pytest.fixture(params=[*LATE, "sim"])
def backend_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A card that does everything late, or its kernels, or nothing; and the simulator."""
    if request.param == "sim":
        yield "sim"
        return
    card = plug_in(monkeypatch, Card(request.param))
    yield "cuda"
    assert card.clean


SETTINGS: dict[str, dict[str, Any]] = {
    "least": {"gpu_cache_bytes": 2 * EXPERT, "prefill_chunk": 7},
    "some": {"gpu_cache_bytes": 5 * EXPERT, "expert_cache_bytes": 6 * EXPERT, "eviction_policy": "lru"},
    "ahead": {"gpu_cache_bytes": 7 * EXPERT, "prefetcher": "next_gate+history"},
    "pins": {"gpu_cache_bytes": 4 * EXPERT, "expert_cache_bytes": 6 * EXPERT, "pin_after_tokens": 2,
             "pin_max_share": 0.5},
    "async": {"gpu_cache_bytes": 4 * EXPERT, "expert_cache_bytes": 4 * EXPERT, "engine_mode": "async",
              "prefetcher": "history"},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tier_changes_no_bit(converted: dict[str, Path], backend_name: str, name: str) -> None:
    with engine(converted["mixtral"], backend="sim") as plain:
        said, scores = greedy(plain, PROMPT, 12), logits(plain, PROMPT)
        assert plain.counters()["gpu"]["experts_evictions"] == 0
    with engine(converted["mixtral"], backend=backend_name, **SETTINGS[name]) as made:
        assert greedy(made, PROMPT, 12) == said
        assert np.array_equal(logits(made, PROMPT), scores)
        counts, about = made.counters()["gpu"], made.describe()
    assert about["gpu_cache_bytes"] == SETTINGS[name]["gpu_cache_bytes"] == counts["experts_capacity"] * EXPERT
    assert (
        counts["experts_evictions"] > 0 and counts["pages_sent"] == counts["experts_faults"] + counts["experts_ahead"]
    )
    assert counts["sends"] >= 2 * counts["page_runs_sent"] > 0 and counts["sent_bytes"] > counts["pages_sent"] * 65536
    assert counts["locked_bytes"] == about["expert_cache_bytes"]
    if name == "ahead":
        assert counts["experts_ahead"] >= counts["experts_ahead_hits"] > 0
    if name == "pins":
        assert counts["experts_pinned"] > 0


@pytest.mark.parametrize(
    ("order", "late", "name"),
    [("after_sent", "everything", "least"), ("after_used", "kernels", "least"), ("settle", "everything", "some")],
)
def test_an_order_that_is_missing_is_seen(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, order: str, late: str, name: str
) -> None:
    """Kernels do not wait for transfers, transfers not for kernels, reads from the disk not for transfers."""
    with engine(converted["mixtral"], backend="sim") as plain:
        right = logits(plain, PROMPT)
    plug_in(monkeypatch, Card(late))
    monkeypatch.setattr(Device, order, lambda *_: None)
    with engine(converted["mixtral"], backend="cuda", **SETTINGS[name]) as made:
        with contextlib.suppress(RequestError, SimulatedFault):  # logits that are not finite, a wrong table
            assert not np.array_equal(logits(made, PROMPT), right)


def test_what_is_on_the_device_is_not_read_again(converted: dict[str, Path], backend_name: str) -> None:
    """With room for all experts on the device and for one token's in memory, the disk is read once for each."""
    with engine(converted["mixtral"], backend="sim") as plain:
        said = greedy(plain, PROMPT, 12)
    with engine(converted["mixtral"], backend=backend_name, expert_cache_bytes=2 * EXPERT) as made:
        assert greedy(made, PROMPT, 12) == said
        faults, spec = made.counters()["pager"]["faults"], made.describe()
        assert greedy(made, PROMPT, 12) == said
        assert made.counters()["pager"]["faults"] == faults <= spec["layers"] * spec["experts"]
        assert made.counters()["gpu"]["experts_evictions"] == 0


def test_host_memory_follows_the_budget(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked is what the host's cache may use, also when that changes while the engine runs."""
    card = plug_in(monkeypatch, Card())
    with engine(converted["mixtral"], backend="sim") as plain:
        said = greedy(plain, PROMPT, 9)
    with engine(converted["mixtral"], backend="cuda", gpu_cache_bytes=3 * EXPERT) as made:
        tokens = []
        for i, token in enumerate(made.generate(PROMPT, max_tokens=9)):
            tokens.append(token.id)
            if i in (2, 5):
                made.settings.expert_cache_bytes = (3 if i == 2 else 6) * EXPERT
            if i in (3, 6):
                assert list(card.locked.values()) == [(3 if i == 3 else 6) * EXPERT]
        assert tokens == said
    assert card.clean


@pytest.mark.parametrize("kind", ["interrupt_at", "error_at"])
def test_the_engine_goes_on_after_an_end_at_any_call(
    converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A step that fails in the middle of anything leaves no expert that is not there: the next request is right."""
    with engine(converted["mixtral"], backend="sim") as plain:
        said = greedy(plain, PROMPT, 5)
    card = plug_in(monkeypatch, Card())
    with engine(converted["mixtral"], backend="cuda", **SETTINGS["ahead"]) as made:
        before = card.calls
        assert greedy(made, PROMPT, 5) == said
        for n in range(1, card.calls - before, 19):
            setattr(card, kind, card.calls + n)
            with pytest.raises(KeyboardInterrupt if kind == "interrupt_at" else CUDARuntimeError):
                for _ in range(3):  # experts that are there already make fewer calls
                    greedy(made, PROMPT, 5)
            assert greedy(made, PROMPT, 5) == said, n
    assert card.clean


def test_a_transfer_waits_for_who_reads_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream waits for an event of the kernels' before it overwrites; kernels wait for an event of its own."""
    card = plug_in(monkeypatch, Card())
    shape = Shape(layers=1, experts=4, top_k=2)
    backend = CudaBackend(Device(CupyDriver()), sharing=Sharing(2 * EXPERT))
    bound = Bound(backend, shape, model=make(shape, 4))
    card.log.clear()
    bound.step([(0, t) for t in (3, 9, 11, 40, 2, 8)])
    assert backend.counters()["experts_evictions"] > 0
    kernels, transfers = (s.ptr for s in sorted(card.streams, key=lambda s: s.ptr))
    waits = [(e[1], e[2]) for e in card.log if e[0] == "wait"]
    assert (kernels, transfers) in waits and (transfers, kernels) in waits
    first_over = waits.index((transfers, kernels))
    assert waits[:first_over].count((kernels, transfers)) == 2, "the first two experts overwrite nobody"
    backend.close()


def test_the_frames_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card())
    shape = Shape(layers=2, experts=6, top_k=2)
    backend = CudaBackend(Device(CupyDriver()), sharing=Sharing(5 * EXPERT))
    Bound(backend, shape, model=make(shape, 4))
    sizes = [e[1] for e in card.log if e[0] == "malloc"]
    assert sizes[-2:] == [5 * EXPERT, 2 * 6 * 4], "frames, then the page table: int32 of layers, experts and pages"
    backend.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "cpu", "gpu_cache_bytes": "1GiB"}, "gpu_cache_bytes: backend cpu uses no GPU; leave it out"),
        ({"backend": "cpu", "gpu_reset_on_exit": True}, "gpu_reset_on_exit: backend cpu uses no GPU"),
        ({"backend": "sim", "gpu_reset_on_exit": True}, "gpu_reset_on_exit: backend sim uses no GPU"),
        (
            {"backend": "sim", "gpu_cache_bytes": EXPERT},
            "gpu_cache_bytes: 0.0625 MiB is too little.*least is 0.125 MiB",
        ),
    ],
)
def test_refusals(converted: dict[str, Path], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), engine(converted["mixtral"], **settings):
        raise AssertionError("an engine was made")


def test_reset_on_exit(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card())
    for reset in (True, False):
        card.log.clear()
        with engine(converted["mixtral"], backend="cuda", gpu_reset_on_exit=reset) as made:
            assert greedy(made, PROMPT, 2)
        assert (("release context", 0) in card.log) == reset and card.clean


def test_a_full_card_refuses_the_engine(converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card(memory=1 << 20))
    with (
        pytest.raises(ConfigError, match="the GPU has no room for"),
        engine(converted["mixtral"], backend="cuda", kv_cache_max_slots=4096),
    ):
        raise AssertionError("an engine was made")
    assert card.clean


def test_sim_has_the_same_tier() -> None:
    backend = CudaBackend(SimDevice(), sharing=Sharing(3 * EXPERT))
    Bound(backend, Shape(), model=make(Shape(), 4))
    assert backend.tier is not None and backend.tier.bytes == 3 * EXPERT
