"""When a step is cut in two: only where it waits, where that has proved the faster way, and never for good."""

from __future__ import annotations

from colibri_lab.dispatch.split import AGAIN, TRIES, Split


def steps(split: Split, count: int, whole: int, cut: int, waited: int, n: int = 8) -> list[bool]:
    """Which of so many steps were cut, where both ways take so long."""
    cuts = []
    for _ in range(count):
        cuts.append(split.pays(n))
        split.ran(n, 2 if cuts[-1] else 1, cut if cuts[-1] else whole, waited)
    return cuts


def test_both_ways_are_tried_and_the_faster_one_stays() -> None:
    for whole, cut in ((100, 80), (80, 100)):
        cuts = steps(Split(), 2 * TRIES + 4 * (AGAIN + 1), whole, cut, 40)
        assert sum(cuts[: 2 * TRIES]) == TRIES
        later = cuts[2 * TRIES :]
        assert sum(c == (cut < whole) for c in later) == 4 * AGAIN  # and the other one once in a while
    assert steps(split := Split(), 100, 80, 100, 40)[-AGAIN:].count(True) <= 1
    assert sum(steps(split, 400, 100, 60, 40)[-100:]) >= 90  # what was slower once is not slower for ever


def test_a_cold_beginning_is_forgotten() -> None:
    split = Split()
    steps(split, 1, 1000, 1000, 900)
    assert sum(steps(split, 400, 80, 100, 40)[-100:]) <= 10


def test_only_steps_that_wait_and_only_of_their_size() -> None:
    split = Split()
    assert not any(steps(split, 100, 100, 10, 12))
    assert any(steps(split, 10, 100, 10, 13))
    assert any(steps(split, 10, 100, 10, 50, 15)) and not split.pays(64) and not split.pays(3)
    assert not any(steps(split, 100, 100, 10, 50, 3))
    assert not any(steps(split, 100, 100, 10, 0)[1:])  # no wait is left


def test_what_is_not_allowed_is_never_cut() -> None:
    assert not any(steps(Split(allowed=False), 100, 100, 10, 50))
