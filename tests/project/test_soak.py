"""The verdict of `make soak` over invented samples: growth after the warm-up decides, and each figure alone."""

from __future__ import annotations

import pytest

from tests.browser.soak import COLUMNS, verdict


def samples(**grows: float) -> list[tuple[float, ...]]:
    """Twenty minutes; `grows`: MB a minute of a column (underscores for blanks), from the fifth minute on."""
    rows = []
    for half in range(41):
        later = max(0, half / 2 - 5)
        rows.append((half / 2, *(100 + later * grows.get(name.replace(" ", "_"), 0) for name in COLUMNS[1:])))
    return rows


def test_what_grows_in_the_warm_up_only_is_no_leak() -> None:
    filling = [(row[0], *(value - max(0, 4 - row[0]) * 20 for value in row[1:])) for row in samples()]
    assert verdict(filling, 20)


@pytest.mark.parametrize("name", ["kernel_RSS", "kernel_PSS", "page_heap"])
def test_each_leak_is_seen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(samples(**{name: 1.2}), 20)
    assert not verdict(samples(**{name: 1.6}), 20)
    said = capsys.readouterr().out
    assert f"{name.replace('_', ' ')} grew by 23.2 MB from minute 4.0 to 20.0: 20 MB at most" in said
