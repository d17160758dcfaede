"""Runs of the embedded model that were recorded, and what its pager counted."""

from __future__ import annotations

from typing import Any

from colibri_lab.analysis.accesses import Accesses, accesses
from colibri_lab.engine.engine import Engine
from colibri_lab.pager.policy import Policy
from colibri_lab.paths import embedded_model

PROMPTS = ("The young lady", "def area(width, height):", "12 + 30 = ", "KING. My lord, ")
Pager = dict[str, int | float]


def record(policy: str | Policy, experts: int, prompts: tuple[str, ...] = PROMPTS, tokens: int = 40,
           **more: Any) -> tuple[Accesses, Pager, list[int]]:  # fmt: skip
    """Generate under a budget of `experts`: (what was asked for, the pager's counters, the tokens)."""
    budget = experts * 65536
    with Engine.load(embedded_model(), eviction_policy=policy, expert_cache_bytes=budget, threads=1, **more) as engine:
        cursor = engine.telemetry.cursor()
        said = [token.id for _, token in engine.generate_batch(prompts, max_tokens=tokens)]
        batch = engine.telemetry.read(cursor)
        assert not batch.missing
        facts = engine.describe()
        return accesses(batch.tokens, batch.route, facts["experts"]), engine.counters()["pager"], said
