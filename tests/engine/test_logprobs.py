"""What tokens were chosen from, as telemetry records it when it is asked to."""

from __future__ import annotations

import math

import numpy as np

from colibri_lab.trace import Batch
from colibri_lab.view.past import Past
from colibri_lab.view.run import RunView

from .conftest import Load


def read(engine) -> Batch:
    return engine.telemetry.read(engine.telemetry.cursor())


def test_nothing_is_recorded_unless_asked(load: Load) -> None:
    engine = load()
    list(engine.generate("A", max_tokens=3))
    assert read(engine).logprobs == []


def test_the_model_s_own_distribution_whatever_the_sampler_does(load: Load) -> None:
    engine = load(telemetry_top_logprobs=4, max_batch_size=2)
    prompts = ["The captain looked", "Seven plus"]
    said = list(engine.generate_batch(prompts, max_tokens=6, temperature=1.5, seed=3))
    told = read(engine).logprobs
    assert len(told) == len(said) == 12
    for i, prompt in enumerate(prompts):
        tokens = [token for which, token in said if which == i]
        start = len(engine.tokenizer.encode(prompt))
        logits = engine.logits([*engine.tokenizer.encode(prompt), *(token.id for token in tokens)]).astype("f8")
        mine = [event for event in told if event[0] == i + 1]
        assert [position for _, position, _, _ in mine] == list(range(start, start + 6))
        for token, (_, position, chosen, best) in zip(tokens, mine, strict=True):
            row = logits[position - 1]
            own = row - np.log(np.exp(row - row.max()).sum()) - row.max()
            assert chosen[0] == token.id and chosen[2] == token.logprob
            assert [id for id, _, _ in best] == np.argsort(-row, kind="stable")[:4].tolist()
            np.testing.assert_allclose([logprob for _, _, logprob in best], own[[id for id, _, _ in best]], atol=1e-4)
            assert [text for _, text, _ in best] == [engine.tokenizer.decode([id]) for id, _, _ in best]


def test_it_is_turned_on_while_running_and_changes_no_token(load: Load) -> None:
    engine = load()
    plain = [token.id for token in engine.generate("A", max_tokens=8)]
    engine.settings.telemetry_top_logprobs = 20
    again = [token.id for token in engine.generate("A", max_tokens=8)]
    assert again == plain
    told = read(engine).logprobs
    assert [chosen[0] for _, _, chosen, _ in told] == plain and len(told[0][3]) == 20
    assert all(best[0][0] == chosen[0] for _, _, chosen, best in told), "greedy: the most probable one"


def test_a_token_of_the_past_in_figures(load: Load) -> None:
    engine = load(telemetry_top_logprobs=3, expert_cache_bytes="1MiB")
    tokens = list(engine.generate("The captain", max_tokens=7))
    past = Past(RunView(8, 16, 2, engine.describe()))
    past.add(read(engine))
    total = 0
    for i, token in enumerate(tokens):
        detail = past.detail(i)
        assert (detail.id, detail.text, detail.sequence) == (token.id, token.text, 1)
        assert detail.experts == token.experts.tolist()
        np.testing.assert_allclose(detail.weights, token.weights, atol=1e-3)
        assert math.log(detail.probability) == token.logprob or abs(math.log(detail.probability) - token.logprob) < 1e-9
        assert detail.best[0] == (token.text, detail.probability), "greedy"
        if i:  # the step of the first one has the prompt's rows too
            assert sum(read == "read" for layer in detail.reads for read in layer) == detail.faults
            assert detail.faults + detail.hits == 16
            assert abs(sum(detail.stages_ms.values()) - detail.latency_ms) < 0.05 * detail.latency_ms
        total += detail.faults
    assert total == engine.counters()["pager"]["faults"] > 0
