"""The embedded model: fp16 weights equal transformers on the same file; int4 costs at most 3 % of perplexity."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.oracle import embedded
from tests.oracle.goldens import NEW_TOKENS, error

from .models import Converter, engine, greedy, levels, logits


@pytest.fixture(scope="module")
def fp16(converted: Converter) -> Path:
    return converted("tiny-moe", embedded.MODEL, quantize="fp16")


@pytest.fixture(scope="module")
def int4(converted: Converter) -> Path:
    return converted("tiny-moe", embedded.MODEL, quantize="int4", group_size=32)


@pytest.mark.parametrize("level", ["reference", *levels()])
def test_logits_and_greedy_tokens(level: str, fp16: Path) -> None:
    golden = embedded.load()
    with engine(fp16, **({"backend": level} if level == "reference" else {"isa": level})) as made:
        assert error(logits(made, golden["ids"].tolist()), golden["logits"]) < 1e-4
        for i in range(embedded.KEPT if level != "reference" else 1):
            assert greedy(made, golden[f"prompt{i}"].tolist(), NEW_TOKENS) == golden[f"tokens{i}"].tolist()


def test_text_in_is_the_same_as_ids_in(fp16: Path) -> None:
    golden = embedded.load()
    with engine(fp16) as made:
        tokens = list(made.generate(str(golden["text0"]), max_tokens=NEW_TOKENS))
    assert [token.id for token in tokens] == golden["tokens0"].tolist()


@pytest.mark.parametrize("name", embedded.validation())
def test_fp16_perplexity_is_that_of_transformers(name: str, fp16: Path) -> None:
    text, right = embedded.validation()[name], float(embedded.load()[f"ppl/{name}"])
    with engine(fp16) as made:
        assert embedded.perplexity(made.logits, text) == pytest.approx(right, rel=2e-4)


def test_int4_perplexity_is_within_three_percent(fp16: Path, int4: Path) -> None:
    """Over all validation texts together, as the issue asks, in both precisions."""
    texts = embedded.validation()
    wide = [math.log(float(embedded.load()[f"ppl/{name}"])) for name in texts]
    right = math.exp(sum(wide) / len(wide))
    for precision in ("exact", "fast"):
        with engine(int4, precision=precision, kv_cache_dtype="fp16") as made:
            ours = [math.log(embedded.perplexity(made.logits, text)) for text in texts.values()]
        assert 0.97 < math.exp(sum(ours) / len(ours)) / right < 1.03


def test_perplexity_method_equals_its_logits(fp16: Path) -> None:
    text = embedded.validation()["novel"][:1500]
    ids = embedded.encode(text)
    assert len(ids) < 1000
    with engine(fp16) as made:
        total, count = embedded.nll(made.logits(ids), ids)
        assert made.perplexity(text) == pytest.approx(math.exp(total / count), rel=1e-4)
