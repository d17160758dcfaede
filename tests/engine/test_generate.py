"""Generation through the whole engine on the embedded model."""

from __future__ import annotations

import gc
import math
import threading
import time
import warnings

import numpy as np
import pytest

from colibri_lab.errors import EngineClosed, RequestError
from colibri_lab.events import NO_EXPERT

from .conftest import Load

PROMPT = "The captain looked at the sea and"


def ids(tokens: object) -> list[int]:
    return [token.id for token in tokens]  # type: ignore[attr-defined]


def test_tokens_say_everything(load: Load) -> None:
    engine = load()
    tokens = list(engine.generate(PROMPT, max_tokens=12))
    assert [t.index for t in tokens] == list(range(12))
    assert [t.finish_reason for t in tokens] == [None] * 11 + ["length"]
    prompt = engine.tokenizer.encode(PROMPT)
    whole = engine.tokenizer.decode([*prompt, *ids(tokens)])
    assert engine.tokenizer.decode(prompt) + "".join(t.text for t in tokens) == whole
    logits = engine.logits([*prompt, *ids(tokens)])
    for i, token in enumerate(tokens):
        row = logits[len(prompt) - 1 + i].astype(np.float64)
        assert token.id == row.argmax()
        expected = row[token.id] - row.max() - math.log(np.exp(row - row.max()).sum())
        assert token.logprob == pytest.approx(expected, abs=1e-4)
        assert token.experts.shape == token.weights.shape == (8, 2) and token.experts.max() < 16 < NO_EXPERT
        assert (token.weights > 0).all() and np.allclose(token.weights.sum(axis=1), 1, atol=1e-5)
        assert token.latency_ms > 0


def test_batch_equals_one_by_one(load: Load) -> None:
    engine = load(max_batch_size=3, prefill_chunk=5)
    prompts = [PROMPT, "A", [1, 5, 9, 200], "Seven plus five is", PROMPT]
    alone = [ids(engine.generate(p, max_tokens=9)) for p in prompts]
    together: dict[int, list[int]] = {}
    for i, token in engine.generate_batch(prompts, max_tokens=9):
        together.setdefault(i, []).append(token.id)
    assert [together[i] for i in range(5)] == alone
    counters = engine.counters()
    assert counters["engine"]["sequences_started"] == counters["engine"]["sequences_finished"] == 10
    assert counters["kv"]["slots_used"] == 0 < counters["kv"]["slots_peak"]
    # Batching is real: 5 requests of 9 tokens, 3 at once, are far fewer steps than one by one.
    steps = counters["engine"]["steps"]
    list(engine.generate_batch(prompts, max_tokens=9))
    assert engine.counters()["engine"]["steps"] - steps < 40


def test_interleaved_iterators_share_steps(load: Load) -> None:
    engine = load()
    expected = [ids(engine.generate(p, max_tokens=10)) for p in ("A", "B")]
    before = engine.counters()["engine"]["steps"]
    pairs = list(zip(engine.generate("A", max_tokens=10), engine.generate("B", max_tokens=10), strict=True))
    assert [[t.id for t in column] for column in zip(*pairs, strict=True)] == expected
    assert engine.counters()["engine"]["steps"] - before <= 12


def test_an_iterator_that_is_not_read_is_not_advanced_but_starves_nobody(load: Load) -> None:
    engine = load(max_batch_size=1)
    idle = engine.generate("A", max_tokens=6)
    first = next(idle)
    assert engine.counters()["engine"]["steps"] == 1
    assert len(ids(engine.generate("B", max_tokens=4))) == 4  # needs the only seat: the idle one is run to its end
    assert len([first, *idle]) == 6


@pytest.mark.parametrize("leave", ["break", "close", "drop", "before"])
def test_consumer_walks_away(load: Load, leave: str) -> None:
    engine = load()
    expected = ids(engine.generate("B", max_tokens=5))
    before = engine.counters()["engine"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = engine.generate(PROMPT, max_tokens=100)
        if leave != "before":
            next(tokens), next(tokens)
        if leave == "break":
            for _ in tokens:
                break
        if leave in ("close", "before"):
            tokens.close()
        del tokens
        gc.collect()
    after = engine.counters()
    assert after["engine"]["steps"] - before["steps"] <= (0 if leave == "before" else 3)
    assert (
        after["kv"]["slots_used"] == 0 and after["engine"]["sequences_started"] == after["engine"]["sequences_finished"]
    )
    assert ids(engine.generate("B", max_tokens=5)) == expected


def test_more_than_one_end_token(load: Load) -> None:
    engine = load()
    plain = ids(engine.generate(PROMPT, max_tokens=10))
    engine.tokenizer.eos = (plain[7], plain[4])
    tokens = list(engine.generate(PROMPT, max_tokens=10))
    assert ids(tokens) == plain[: plain.index(plain[4]) + 1]
    assert tokens[-1].finish_reason == "stop" and tokens[-1].text == ""
    assert engine.tokenizer.decode([plain[4]]).strip() not in "".join(t.text for t in tokens).split()[-1:]


def test_stop_text_across_tokens(load: Load) -> None:
    engine = load()
    text = "".join(t.text for t in engine.generate(PROMPT, max_tokens=30))
    stop = text[20:27]  # cuts through tokens
    tokens = list(engine.generate(PROMPT, max_tokens=30, stop=["never there", stop]))
    assert "".join(t.text for t in tokens) == text[: text.index(stop)] and tokens[-1].finish_reason == "stop"
    almost = list(engine.generate(PROMPT, max_tokens=30, stop=text[-4:] + "~"))
    assert "".join(t.text for t in almost) == text and almost[-1].finish_reason == "length"


def test_prompts_of_no_one_and_too_many_tokens(load: Load) -> None:
    engine = load()
    assert (
        ids(engine.generate("", max_tokens=3))
        == ids(engine.generate([1], max_tokens=3))
        == ids(engine.generate([], max_tokens=3))
    )
    with pytest.raises(RequestError, match=r"1030 tokens, 6 more than the context of 1024"):
        engine.generate([5] * 1030)
    full = list(engine.generate([5] * 1022, max_tokens=50))
    assert len(full) == 3 and full[-1].finish_reason == "length"
    assert list(engine.generate("A", max_tokens=0)) == []
    engine.tokenizer.bos = None
    object.__setattr__(engine.spec, "bos", None)
    with pytest.raises(RequestError, match="no start token"):
        engine.generate([])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompt": [3072]}, "token id 3072 at place 0"),
        ({"prompt": [1, -1]}, "token id -1 at place 1"),
        ({"prompt": [1.5]}, "token id 1.5"),
        ({"prompt": np.zeros((2, 2), np.int64)}, "at place 0 is no whole number"),
        ({"prompt": None}, "a text or a list of token ids, not None"),
        ({"prompt": 5}, "a text or a list of token ids, not 5"),
        ({"prompt": b"The sea"}, "a text or a list of token ids, not b'The sea'"),
        ({"prompt": {"The": 1}}, "a text or a list of token ids"),
        ({"prompt": "a\ud800"}, "lone surrogate at character 1"),
        ({"prompt": "A", "stop": 5}, "stop"),
        ({"prompt": "A", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "A", "temperature": -0.1}, "temperature"),
        ({"prompt": "A", "temperature": math.nan}, "temperature"),
        ({"prompt": "A", "top_p": 1.1}, "top_p"),
        ({"prompt": "A", "top_k": -1}, "top_k"),
        ({"prompt": "A", "seed": "x"}, "seed"),
        ({"prompt": "A", "stop": [""]}, "stop"),
    ],
)
def test_wrong_requests_are_refused_at_once(load: Load, wrong: dict, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load().generate(**wrong)


def test_numbers_of_numpy_are_numbers(load: Load) -> None:
    engine = load()
    plain = ids(engine.generate([5, 6], max_tokens=4, temperature=0.5, top_k=9, seed=3))
    numpy = engine.generate(np.array([5, 6]), np.int64(4), np.float32(0.5), np.int32(9), seed=np.uint8(3))
    assert ids(numpy) == plain and len(plain) == 4


def test_text_where_ids_are_due(load: Load) -> None:
    engine = load()
    assert np.array_equal(engine.logits("The sea"), engine.logits(engine.tokenizer.encode("The sea")))
    for wrong in (None, 5, b"The sea"):
        with pytest.raises(RequestError, match="a text or a list of token ids"):
            engine.logits(wrong)
        with pytest.raises(RequestError, match="a text or a list of token ids"):
            engine.perplexity(wrong)


def test_seed_is_the_requests_own(load: Load) -> None:
    engine = load()
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 8}
    alone = ids(engine.generate(PROMPT, seed=7, **sampling))
    others = [engine.generate("B", **sampling), engine.generate("C", seed=7, **sampling)]
    mixed = []
    for token in engine.generate(PROMPT, seed=7, **sampling):
        mixed.append(token.id)
        for other in others:
            next(other, None)
    assert mixed == alone
    assert len({tuple(ids(engine.generate(PROMPT, seed=s, **sampling))) for s in range(5)}) > 1


def test_perplexity(load: Load) -> None:
    engine = load()
    text = "It was the best of times. " * 10
    tokens = engine.tokenizer.encode(text)
    logits = engine.logits(tokens).astype(np.float64)
    losses = [np.log(np.exp(row - row[i]).sum()) for row, i in zip(logits[:-1], tokens[1:], strict=True)]
    assert engine.perplexity(text) == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    long = engine.tokenizer.encode("All the world is a stage, and all the men and women merely players. " * 90)
    assert len(long) > 1024
    assert 1 < engine.perplexity(long) < 100
    assert engine.counters()["kv"]["slots_used"] == 0
    with pytest.raises(RequestError, match="at least 2 tokens"):
        engine.perplexity([1])


def test_two_threads_on_one_engine(load: Load) -> None:
    engine = load()
    expected = {p: ids(engine.generate(p, max_tokens=25)) for p in ("A", "B", "C")}
    got: dict[str, list[int]] = {}
    threads = [
        threading.Thread(target=lambda p=p: got.__setitem__(p, ids(engine.generate(p, max_tokens=25))))
        for p in expected
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == expected


def test_close(load: Load) -> None:
    before = threading.active_count()
    engine = load(expert_cache_bytes="1MiB")
    tokens = engine.generate(PROMPT)
    next(tokens)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        next(tokens)
    with pytest.raises(EngineClosed):
        engine.logits([1])
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_closing_while_others_compute(load: Load) -> None:
    """Every thread gets EngineClosed in the end, and no kernel runs on memory that is gone."""
    engine = load(max_batch_size=2, prefill_chunk=4)
    ends: list[BaseException] = []

    def work(what: int) -> None:
        try:
            while True:
                if what:
                    engine.logits(list(range(3, 60)))
                else:
                    ids(engine.generate(PROMPT, max_tokens=9))
        except EngineClosed as error:
            ends.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    engine.close()
    for thread in threads:
        thread.join(10)
    assert len(ends) == 5 and engine.counters()["kv"]["slots_used"] == 0


def test_a_forgotten_engine_is_freed(load: Load, model: object) -> None:
    import weakref

    from colibri_lab.engine import Engine

    engine = Engine.load(model, threads=1)  # type: ignore[arg-type]
    next(engine.generate("A"))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_it_shows_itself(load: Load) -> None:
    engine = load()
    assert "tiny-moe" in repr(engine) and "mixtral" in repr(engine)
    html = engine._repr_html_()
    assert "<svg" in html and "expert cache" in html and "&lt;svg" not in html
