"""One emulated core for each level and module; a missing tool fails and names its package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .machine import LEVELS, Machine


@pytest.fixture(scope="module", params=LEVELS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(request.param)
    yield made
    made.close()
