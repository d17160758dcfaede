"""When a step is cut in two: only where waiting lasts longer than what cutting costs, and never for good."""

from __future__ import annotations

from colibri_lab.dispatch.split import AGAIN, Split


def test_only_steps_that_wait_are_cut_and_only_of_their_size() -> None:
    split = Split()
    assert not split.pays(8)
    split.ran(8, 1, 10, 100, 40)
    assert split.pays(8) and split.pays(15) and not split.pays(64) and not split.pays(3)
    split.ran(64, 1, 100, 50, 400)
    assert not split.pays(64)
    assert not Split(allowed=False).pays(8)


def test_it_looks_again() -> None:
    split = Split(allowed=True)
    split.ran(8, 1, 10, 100, 40)
    cut = 0
    while split.pays(8):
        split.ran(8, 2, 15, 40, 50)
        cut += 1
    assert cut == AGAIN
    split.ran(8, 1, 10, 100, 40)
    assert split.pays(8)
    split.ran(8, 2, 10, 1, 40)  # no wait is left
    assert not split.pays(8)
    split.ran(8, 1, 10, 0, 40)
    split.ran(8, 1, 10, 0, 40)
    assert not split.pays(8)


def test_what_is_not_allowed_is_never_cut() -> None:
    split = Split(allowed=False)
    split.ran(8, 1, 10, 1000, 40)
    assert not split.pays(8)
