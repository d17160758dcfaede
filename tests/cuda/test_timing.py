"""Kernels timed on a card: here on one that is not there, and where there is none at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colibri_lab.ops import gpu
from colibri_lab.ops.examples import norm
from colibri_lab.ops.timing import time_on_gpu

from .card import Card, plug_in


def test_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card())
    said = time_on_gpu(norm(), rounds=5)
    assert said.microseconds and said.gigabytes_per_s and card.clean
    assert str(said).startswith("rms_norm: ") and str(said).endswith("GB/s on Fake H0")
    launches = [what for what in card.log if what[0] == "launch"]
    assert len(launches) == 1 + 5 and all(what[2] == "rms_norm" for what in launches)


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "trouble", lambda: gpu.Check("driver", False, "there is no driver", "get one"))
    said = time_on_gpu(norm())
    assert said.microseconds is None and str(said) == "no GPU here: there is no driver"


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card())
    one = norm()
    wrong = replace(one, want={"out": one.want["out"] + 1})
    with pytest.raises(RuntimeError, match=r"rms_norm on this card: out\[0, 0\] is"):
        time_on_gpu(wrong)
    assert card.clean
