"""What all tests share: a cache folder inside the checkout, so that a test run leaves the user's own alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
os.environ.setdefault("COLIBRI_CACHE", str(TOP / "build" / "test-cache"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here loads from a hub


@pytest.fixture(scope="session")
def top() -> Path:
    """The top folder of the checkout."""
    return TOP
