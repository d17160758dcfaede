"""Tests marked `oracle` belong to `make test-oracle`, which installs torch and transformers; else deselected."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return
    left_out = [item for item in items if item.get_closest_marker("oracle")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
