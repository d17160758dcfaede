"""The eviction policy changes while text is being generated: the counters move, the text does not."""

from __future__ import annotations

import pytest

from colibri_lab.config import EVICTION
from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError
from colibri_lab.paths import embedded_model


def test_live_switch() -> None:
    def run(order: tuple[str, ...]) -> tuple[list[int], int]:
        with Engine.load(embedded_model(), threads=1, expert_cache_bytes="2MiB", eviction_policy=order[0]) as engine:
            said = []
            for i, token in enumerate(engine.generate("The young lady", max_tokens=100)):
                said.append(token.id)
                engine.settings.eviction_policy = order[i // 20]
            assert engine.describe()["eviction_policy"] == order[-1]
            assert order[0] == order[-1] or engine.telemetry.facts["settings"] == {"eviction_policy": order[-1]}
            pager = engine.counters()["pager"]
            assert pager["faults"] - pager["evictions"] == pager["experts_resident"] <= 32
            return said, int(pager["faults"])

    said, faults = run(("lru",) * 5)
    switched, other = run(EVICTION)
    assert said == switched and faults != other


def test_a_foreign_policy_takes_over_and_a_wrong_one_is_refused() -> None:
    from colibri_lab.pager.policy import LRU

    class Mine(LRU):
        asked = 0

        def victim(self, busy: object) -> int:
            self.asked += 1
            return super().victim(busy)  # type: ignore[arg-type]

    with Engine.load(embedded_model(), threads=1, expert_cache_bytes="1MiB") as engine:
        list(engine.generate("The young lady", max_tokens=5))
        mine = Mine()
        before = engine.counters()["pager"]["evictions"]
        engine.settings.eviction_policy = mine
        list(engine.generate("The young lady", max_tokens=5))
        assert mine.asked == engine.counters()["pager"]["evictions"] - before > 0
        assert engine.describe()["eviction_policy"] == "Mine"
        with pytest.raises(ConfigError, match="eviction_policy: 'newest' is neither lru, lfu"):
            engine.settings.eviction_policy = "newest"
