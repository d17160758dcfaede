"""The embedded model, converted once a session, and engines over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from colibri_lab.convert import convert
from colibri_lab.engine import Engine
from colibri_lab.paths import embedded_model

Load = Callable[..., Engine]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(embedded_model(), tmp_path_factory.mktemp("models") / "tiny-moe", quantize="int4")


@pytest.fixture
def load(model: Path) -> Iterator[Load]:
    """Engine.load of the embedded model with settings; closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Engine.load(model, **{"threads": 1, **settings}))
