"""Tokens that the engine lets the GPU choose: the text of the host's sampler, whoever chose, and logits that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.engine.engine import Engine
from colibri_lab.engine.request import Asked
from colibri_lab.ops.cuda_sample import Chooser, Chosen
from colibri_lab.ops.cuda_whole import Found
from tests.parity.models import engine

PROMPT = [5, 9, 33, 2, 60, 17, 8]
HOW: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 7, "seed": 4},
    {"temperature": 0.9, "top_p": 0.7, "seed": 5},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.3, "seed": 6},
    {"repetition_penalty": 1.4},
]


def texts(made: Engine, listed: int = 0, many: int = 10) -> list[list[tuple[int, float]]]:
    """One text for each of HOW, all running together, with their log probabilities. listed: after how many tokens
    others want to see the logits for two tokens."""
    running = [made.generate(PROMPT, max_tokens=many, **how) for how in HOW]
    out: list[list[tuple[int, float]]] = [[] for _ in running]
    for step in range(many):
        if listed:
            made.settings.telemetry_top_logprobs = 2 if listed <= step < listed + 2 else 0
        for text, it in zip(out, running, strict=True):
            token = next(it)
            text.append((token.id, token.logprob))
    return out


def alone(made: Engine) -> list[list[tuple[int, float]]]:
    """The same, one behind the other."""
    return [[(t.id, t.logprob) for t in made.generate(PROMPT, max_tokens=10, **how)] for how in HOW]


def count(made: Engine, name: str) -> int:
    return int(made.counters()["gpu"][name])


def hosts(path: Path) -> list[list[tuple[int, float]]]:
    """What the host's sampler says to the simulator's logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colibri_lab.ops.cuda.MOST_VOCAB", 1)
        with engine(path, backend="sim", max_batch_size=8) as made:
            said = texts(made)
            total = sum(map(len, said))
            assert count(made, "tokens_chosen") == 0 and count(made, "tokens_too_wide") == total
            return said


@pytest.fixture(scope="module")
def on_host(converted: dict[str, Path]) -> list[list[tuple[int, float]]]:
    return hosts(converted["mixtral"])


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_the_hosts_text_and_no_logits_travel(converted: dict[str, Path], on_host: Any, graphs: str) -> None:
    with engine(converted["mixtral"], backend="sim", cuda_graphs=graphs, max_batch_size=8) as made:
        assert texts(made) == on_host
        done = count(made, "tokens_chosen")
        assert done == 10 * len(HOW) and count(made, "tokens_unsure") == 0
        assert alone(made) == on_host
        assert count(made, "tokens_chosen") == 2 * done
        if graphs == "on":
            told, text = made.describe(), made.generate(PROMPT, max_tokens=9)
            for _ in range(3):
                next(text)
            before = count(made, "read_bytes")
            for _ in range(5):
                next(text)
            assert count(made, "read_bytes") - before == 5 * 4 * Found.most(told["layers"], 1, told["top_k"])


def test_the_reference_says_the_same(converted: dict[str, Path]) -> None:
    """In `exact` its logits are not the device's to the bit; draws are seldom so near an edge that it shows."""
    said = []
    for backend in ("reference", "sim"):
        with engine(converted["mixtral"], backend=backend, max_batch_size=8) as made:
            said.append([[id for id, _ in text] for text in texts(made)])
    assert said[0] == said[1]


def test_where_it_is_not_sure_the_host_chooses(
    converted: dict[str, Path], on_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third token is called unsure, with a wrong one in its place: the same text."""
    plain, calls = Chooser.choose, [0]

    def unsure(self: Chooser, *given: Any) -> Chosen:
        token, sure, value = plain(self, *given)
        for i in range(len(token)):
            calls[0] += 1
            if calls[0] % 3 == 0:
                token[i], sure[i], value[i] = 0, False, np.nan
        return Chosen(token, sure, value)

    monkeypatch.setattr(Chooser, "choose", unsure)
    with engine(converted["mixtral"], backend="sim", max_batch_size=8) as made:
        assert texts(made) == on_host
        assert count(made, "tokens_unsure") == calls[0] // 3 > 15


def test_logits_that_others_want_come_to_the_host(converted: dict[str, Path], on_host: Any) -> None:
    """Asked for in the middle of the texts, and not any more after: who is penalised is known on both sides."""
    with engine(converted["mixtral"], backend="sim", max_batch_size=8, telemetry=True) as made:
        assert texts(made, listed=4) == on_host
        assert 0 < count(made, "tokens_listed") < count(made, "tokens_chosen")
        assert count(made, "tokens_listed") + count(made, "tokens_chosen") == 10 * len(HOW)


def test_both_sides_know_what_was_seen(converted: dict[str, Path]) -> None:
    """Of a request whose tokens the host chose for a while: the device's marks are the sampler's."""
    with engine(converted["mixtral"], backend="sim", telemetry=True) as made:
        request, text = made.begin(PROMPT, Asked(max_tokens=12, repetition_penalty=1.3))
        for listed in (0, 0, 2, 2, 0, 0):
            made.settings.telemetry_top_logprobs = listed
            next(text)
        chooser = made._parts.backend.chooser  # type: ignore[attr-defined]
        seen = made._parts.backend.device.read(chooser._seen[request.seat])  # type: ignore[attr-defined]
        assert np.flatnonzero(seen).tolist() == sorted(request.sampler.seen or ())


def test_counters_fit_into_a_sample(converted: dict[str, Path]) -> None:
    """Telemetry keeps a limited number of counters by name; all of them are among these."""
    from colibri_lab.events import GAUGES

    with engine(converted["mixtral"], backend="sim") as made:
        assert sum(len(system) for system in made.counters().values()) <= GAUGES
