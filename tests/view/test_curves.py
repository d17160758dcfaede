"""Curves as a picture that needs no kernel."""

from __future__ import annotations

import re

import pytest

from colibri_lab.view.curves import Curves


def test_a_picture_of_lines() -> None:
    made = Curves("Misses <1>", "experts", [8, 16, 32], {"lru & co": [0.5, 0.25, 0.0], "best": [0.4, 0.2, 0.0]})
    html = made._repr_html_()
    assert (
        html.count("<polyline") == 2
        and "Misses &lt;1&gt;" in html
        and "lru &amp; co 25.0 % at 16<" in html
        and "best 20.0 % at 16<" in html
    )
    first = re.findall(r"points='([^']+)'", html)[0].split()
    ys = [float(point.split(",")[1]) for point in first]
    assert ys == sorted(ys) and ys[0] == 8 and ys[-1] == 206  # falling lines go down the picture
    assert "role='img'" in html and "http" not in html.replace("http://www.w3.org", "")
    assert "best" in repr(made)


def test_wrong_lengths_and_nothing() -> None:
    with pytest.raises(ValueError, match="lru: 1 values for 2 places"):
        Curves("a", "b", [1, 2], {"lru": [0.1]})
    assert "<svg" in Curves("a", "b", [], {})._repr_html_()


def test_a_place_is_marked():
    html = Curves(
        "Hits", "budget", [10, 50, 100], {"lru": [0.2, 0.5, 0.8]}, (50, 0.45, "engine now: 45.0 %")
    )._repr_html_()
    assert html.count("<circle") == 1 and html.count("engine now: 45.0 %") == 2


def test_places_close_together_share_a_label():
    html = Curves("Hits", "budget", [10, 12, 50, 100], {"lru": [0.2, 0.3, 0.5, 0.8]})._repr_html_()
    assert re.findall(r"text-anchor='middle'>(\d+)<", html) == ["10", "50", "100"]
