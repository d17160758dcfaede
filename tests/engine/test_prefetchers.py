"""Each prefetcher and the pins inside the engine: the counters prove them, the tokens stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from colibri_lab.config import PREFETCH
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import PagerError
from colibri_lab.ops.types import Rows
from colibri_lab.pager import lookahead
from colibri_lab.pager.lookahead import Busy, Lookahead, Recall
from colibri_lab.pager.prefetchers import NextGate
from colibri_lab.paths import embedded_model
from tests.makers import make

PROMPT = "The young lady"
Load = Callable[..., Engine]


@pytest.fixture(autouse=True)
def any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read does not depend on how busy the disk is."""
    monkeypatch.setattr(lookahead, "SURE", 0.0)


def load(**settings: Any) -> Engine:
    return Engine.load(embedded_model(), **({"threads": 1, "expert_cache_bytes": "3MiB"} | settings))


def run(tokens: int = 60, **settings: Any) -> tuple[list[int], dict[str, float]]:
    with load(**settings) as engine:
        said = [token.id for token in engine.generate(PROMPT, max_tokens=tokens)]
        assert engine.describe()["prefetcher"] == settings.get("prefetcher", "none")
        return said, engine.counters()["pager"]


def test_each_prefetcher_reads_ahead_and_changes_no_token() -> None:
    runs = {name: run(prefetcher=name) for name in PREFETCH}
    assert len({tuple(said) for said, _ in runs.values()}) == 1
    for name, (_, c) in runs.items():
        assert (c["prefetch_issued"] > 0) == (c["prefetch_bytes"] > 0) == (name != "none")
        assert c["prefill_hits"] + c["decode_hits"] == c["hits"] and c["decode_faults"] > 0
    assert runs["next_gate"][1]["decode_prefetch_recall"] > 0.6
    assert 0.4 < runs["history"][1]["decode_prefetch_recall"] < runs["next_gate"][1]["decode_prefetch_recall"]
    assert runs["next_gate"][1]["prefetch_hits"] + runs["next_gate"][1]["prefetch_late"] > 100
    assert not any(c for name, c in runs["none"][1].items() if "prefetch" in name)


def test_pages_limit_a_guess() -> None:
    issued = [run(prefetcher="next_gate", expert_prefetch_pages=n)[1]["prefetch_issued"] for n in (0, 1, None)]
    assert issued[0] == 0 < issued[1] < issued[2]


def test_next_gate_is_the_next_router_on_this_hidden_state() -> None:
    with load(prefetcher="next_gate") as engine:
        seen: list[tuple[int, np.ndarray, list[list[int]], Any]] = []
        prefetcher = engine._parts.ahead._prefetchers["next_gate"]
        guess, rows, weights = prefetcher.guess, engine._parts.rows, engine._parts.file.weights()

        def spy(layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Any:
            answer = guess(layer, chosen, missing)
            seen.append((layer, rows.x[: len(chosen)].copy(), [list(row) for row in chosen], answer))
            return answer

        prefetcher.guess = spy
        list(engine.generate(PROMPT, max_tokens=20))
    assert {layer for layer, *_ in seen} == set(range(8))
    for layer, x, _, (target, experts) in seen:
        if layer == 7:
            assert not experts
            continue
        after = weights.layers[layer + 1]
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + weights.norm_eps) * after.post_norm
        wanted = np.argsort(-(normed @ after.gate.T), axis=1, kind="stable")[:, :2]
        assert target == layer + 1
        if len(x) == 1:
            assert list(experts) == wanted[0].tolist()
        else:
            assert set(experts) == set(wanted.ravel().tolist())


def test_the_guess_waits_for_a_shared_expert(tmp_path: Any) -> None:
    from colibri_lab.convert import convert

    path = convert(make("qwen2_moe", 7).save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    with Engine.load(path, prefetcher="next_gate", precision="exact", threads=1) as engine:
        transformer = engine._parts.transformer
        assert transformer._late is engine._parts.ahead and transformer._early is None
        engine.settings.expert_cache_bytes = engine.describe()["expert_cache_least_bytes"] * 2
        states: list[bytes] = []
        computed: list[bytes] = []
        look, ffn, rows = transformer._late.look, transformer.backend.expert_ffn, engine._parts.rows

        def after(layer: int, n: int, first: int, last: int) -> None:
            ffn(layer, n, first, last)
            computed.append(rows.x[:n].tobytes())

        def watch(layer: int, chosen: Sequence[Sequence[int]]) -> None:
            states.append(rows.x[: len(chosen)].tobytes())
            assert states[-1] == computed[-1], "the hidden state holds the shared expert's output already"
            look(layer, chosen)

        transformer._late.look, transformer.backend.expert_ffn = watch, after
        list(engine.generate([3, 4, 5], max_tokens=8))
        assert states and engine.counters()["pager"]["prefetch_issued"] > 0
    assert not NextGate(Rows.allocate(1, 4, 4, 2, 8), load_weights()).after_experts


def test_prefetchers_combine_and_each_is_counted() -> None:
    """The gate knows nothing of the first layer of the next token; history does, and takes what the limit leaves."""
    gate, both = (run(prefetcher=name)[1] for name in ("next_gate", "next_gate+history"))
    assert both["decode_prefetch_recall_next_gate"] > both["decode_prefetch_recall_history"] > 0.4
    assert abs(both["decode_prefetch_recall_next_gate"] - gate["decode_prefetch_recall"]) < 0.02
    assert both["prefetch_issued"] > gate["prefetch_issued"]
    said, three = run(prefetcher="next_gate+neighbour+history", expert_prefetch_pages=6)
    assert said == run()[0] and 0 < three["decode_prefetch_recall_neighbour"] < 0.4


def test_a_combination_shares_its_limit_and_reads_nothing_twice() -> None:
    class Pager:
        top_k, context, missed, full, decode = 2, 1, [9], False, True
        frames = type("Frames", (), {"pages": 1})()
        ahead = type("Ahead", (), {"most": 5})()

        def __init__(self) -> None:
            self.asked: list[tuple[int, list[int]]] = []

        def guess(self, wanted: bool) -> None: ...

        def settle(self, layer: int) -> None: ...

        def reading_ns(self) -> int:
            return 0

        def prefetch(self, layer: int, experts: list[int], most: int) -> int:
            self.asked.append((layer, experts[:most]))
            return len(experts[:most])

    class Says:
        def __init__(self, *answer: Any) -> None:
            self.guess = lambda layer, chosen, missing: answer

    pager = Pager()
    parts = {"a": Says(1, [3, 4]), "b": Says(1, [4, 5]), "c": Says(0, [7, 8, 9])}
    ahead = Lookahead(pager, lambda chosen: parts, 5)  # type: ignore[arg-type]
    ahead.follow("a+b+c")
    ahead.look(0, [[1, 2]])
    assert pager.asked == [(1, [3, 4, 5]), (0, [7, 8])]
    parts.clear()
    ahead.look(1, [[4, 5]])
    recall = {name: value for name, value in ahead.counters().items() if name.startswith("decode")}
    assert recall == {"decode_prefetch_recall": 1, "decode_prefetch_recall_a": 0.5, "decode_prefetch_recall_b": 1,
                      "decode_prefetch_recall_c": 0}  # fmt: skip


def test_places_that_are_seldom_right_are_not_read_where_the_disk_is_busy() -> None:
    recall = Recall()
    assert recall.likely([1, 2, 3], 1.0) == [1, 2, 3], "a new place has yet to show it"
    for i in range(400):
        recall.guessed(0, [1, 2, 3])
        recall.known(0, {1, 2 if i % 2 else 4, 5}, decode=True)  # places 0, 1, 2: always, half, never
    assert recall.likely([7, 8, 9], 0.0) == [7, 8, 9] and recall.likely([7, 8, 9], 0.3) == [7, 8]
    assert recall.likely([7, 8, 9, 6], 0.8) == [7, 6]
    for _ in range(400):  # what was long ago counts no more
        recall.guessed(0, [1, 2, 3])
        recall.known(0, {3, 9}, decode=True)
    assert recall.likely([7, 8, 9], 0.8) == [9]
    assert recall.counters("x")["decode_x"] == pytest.approx((400 + 200 + 400) / (400 * 3 + 400 * 2), abs=0.15)


def test_a_busy_disk_is_told_by_its_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reading = [0], [0]
    monkeypatch.setattr(lookahead, "clock", lambda: now[0])
    busy = Busy()

    def pass_(ms: int, share: float) -> float:
        now[0] += ms * 1_000_000
        reading[0] += int(share * ms * 1_000_000)
        for _ in range(lookahead.LOOKS):
            said = busy.now(lambda: reading[0])
        return said

    assert busy.now(lambda: 10**9) == 0 and pass_(1, 1.0) == 0, "not asked before some time has passed"
    for _ in range(12):
        said = pass_(20, 1.0)
    assert said > 0.99
    for _ in range(12):
        said = pass_(20, 0.25)
    assert said == pytest.approx(0.25, abs=0.01)
    assert pass_(20, 3.0) <= 1


def test_a_busy_disk_reads_what_is_likely_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said, free = run(prefetcher="neighbour")
    monkeypatch.setattr(lookahead, "SURE", 0.8)
    monkeypatch.setattr(Busy, "now", lambda self, reading_ns: 1.0)
    again, bound = run(prefetcher="neighbour")
    assert again == said and 0 < bound["prefetch_issued"] < free["prefetch_issued"] / 2
    assert bound["decode_prefetch_recall"] > 0, "recall counts what was said, read or not"


def test_second_gate_asks_two_layers_ahead() -> None:
    with load(prefetcher="next_gate+second_gate") as engine:
        both = engine._parts.ahead._prefetchers
        seen: dict[str, set[tuple[int, int]]] = {name: set() for name in both}
        for name, prefetcher in both.items():

            def spy(layer: int, chosen: Any, missing: Any, guess: Any = prefetcher.guess, name: str = name) -> Any:
                answer = guess(layer, chosen, missing)
                seen[name].add((layer, answer[0] if answer[1] else -1))
                return answer

            prefetcher.guess = spy
        list(engine.generate(PROMPT, max_tokens=30))
        counters = engine.counters()["pager"]
    assert seen["next_gate"] == {(layer, layer + 1 if layer < 7 else -1) for layer in range(8)}
    assert seen["second_gate"] == {(layer, layer + 2 if layer < 6 else -1) for layer in range(8)}
    near, far = (counters[f"decode_prefetch_recall_{name}"] for name in ("next_gate", "second_gate"))
    assert 0.5 < far < near


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_live_switch(mode: str) -> None:
    """None, one, several, none again, while text is written: each phase is counted, frames are given back."""

    def said(order: tuple[Any, ...]) -> tuple[list[int], list[dict[str, float]]]:
        ids, counts = [], []
        with load(prefetcher=order[0], engine_mode=mode) as engine:
            for i, token in enumerate(engine.generate(PROMPT, max_tokens=20 * len(order), temperature=1.0, seed=4)):
                ids.append(token.id)
                if i % 20 == 19:
                    counts.append(engine.counters()["pager"])
                    engine.settings.prefetcher = order[min(i // 20 + 1, len(order) - 1)]
            assert engine.describe()["prefetcher"] == (order[-1] or "none")
            assert engine.telemetry.facts["settings"] == {"prefetcher": order[-1] or "none"}
        return ids, counts

    plain, _ = said(("none",) * 8)
    ids, counts = said(("none", "history", "neighbour+next_gate", "next_gate", *(None,) * 4))
    assert ids == plain
    issued = [c["prefetch_issued"] for c in counts]
    assert 0 == issued[0] < issued[1] < issued[2] < issued[3] == issued[7]
    assert [c["prefetcher_changes"] for c in counts[:5]] == [0, 1, 2, 3, 4]
    assert counts[7]["frames_used"] == counts[7]["frames"] > counts[3]["frames_used"], "demand has all frames again"
    assert counts[7]["decode_prefetch_recall_next_gate"] > 0.5


def load_weights() -> Any:
    with load() as engine:
        return engine._parts.file.weights()


def test_pins_are_counted_and_change_no_token() -> None:
    plain, before = run(tokens=80, pin_after_tokens=None)
    pinned, c = run(tokens=80, pin_after_tokens=3)
    assert plain == pinned and before["pin_hits"] == before["pins"] == 0
    assert c["pins"] > 0 and c["pin_hits"] > 0
    _, capped = run(tokens=80, pin_after_tokens=3, pin_max_share=0.05)
    assert 0 < capped["pin_hits"] < c["pin_hits"] and capped["pinned"] <= 2
    assert run(tokens=20, pin_after_tokens=3, pin_max_share=0)[1]["pins"] == 0


def test_a_foreign_prefetcher() -> None:
    class Same:
        """Guesses that the next layer uses the same numbers."""

        def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Any:
            return (layer + 1) % 8, list(chosen[-1])

    class Wrong:
        def guess(self, layer: int, chosen: Sequence[Sequence[int]], missing: Sequence[int]) -> Any:
            return layer, [99]

    plain, _ = run(tokens=10)
    with load(prefetcher=Same()) as engine:
        assert [t.id for t in engine.generate(PROMPT, max_tokens=10)] == plain
        assert engine.counters()["pager"]["prefetch_issued"] > 0 and engine.describe()["prefetcher"] == "Same"
    with load(prefetcher=Wrong()) as engine, pytest.raises(PagerError, match="expert 99 of layer 0: there are 16"):
        list(engine.generate(PROMPT, max_tokens=2))
