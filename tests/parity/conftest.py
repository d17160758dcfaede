"""Fixtures of the whole-engine tests."""

from __future__ import annotations

import pytest

from .models import Converter


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converter:
    return Converter(tmp_path_factory.mktemp("converted"))
