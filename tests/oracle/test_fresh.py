"""`make test-oracle`: transformers makes every golden afresh, and it equals the committed one."""

from __future__ import annotations

import pytest

from . import embedded, make_goldens
from .goldens import load
from .settings import SETTINGS

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # torch and transformers warn as they like


@pytest.mark.parametrize("key", SETTINGS)
def test_golden_made_afresh(key: str) -> None:
    make_goldens.same(key, make_goldens.make_one(SETTINGS[key], load(key).seed))


def test_embedded_golden_made_afresh() -> None:
    embedded.same(embedded.make(make_goldens.load_transformers, make_goldens.logits_of, make_goldens.greedy_of))


def test_seed_search_repeats() -> None:
    """The committed seeds are the first healthy ones: nobody picked a lucky one by hand."""
    for key in ("mixtral-head_dim", "qwen3_moe-window"):
        assert make_goldens.find_seed(SETTINGS[key]) == load(key).seed
