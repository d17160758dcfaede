"""A history that repeats its beginning is what computing it would have stored, as far as one can know without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.history import History, unlock_routing
from colibri_lab.bench.shapes import SHAPES

IDS = np.random.default_rng(5).integers(0, 1024, 64).tolist()


def engine(**settings):
    shape = replace(SHAPES["nano"], positions=3000)  # more than its file says
    return ours.load(shape, 0, 1, max_batch_size=1, telemetry=False, **settings)


def test_repeated_keys_are_those_of_their_new_position() -> None:
    """The first layer's keys and values depend on token and position alone, so there the two can be compared."""
    with engine() as made:
        assert made.describe()["max_positions"] == 3000
        computed, repeated = History(made, IDS * 40), History(made, IDS)
        computed.read(2560)
        repeated.read(64)
        repeated.repeat(2560)
        pool = made._parts.kv.pool
        keys, values = ([part[pool.where[h.seat, 0, :2560]] for h in (computed, repeated)] for part in (pool.k, pool.v))
        assert np.array_equal(values[0], values[1])
        assert np.abs(keys[0].astype(np.float32) - keys[1]).max() < 4e-3 * np.abs(keys[0]).max()
        assert np.abs(keys[0][64:128].astype(np.float32) - keys[0][:64]).max() > 0.1  # control: they do turn
        assert (pool.first[repeated.seat, :, 64:128] == pool.first[repeated.seat, :, :64]).all()
        assert made.counters()["kv"]["tokens"] == 2 * 2 * 2560
        repeated.close()
        computed.close()
        assert made.counters()["kv"]["slots_used"] == 0


def test_decoding_leaves_the_history_as_it_was_and_modes_differ() -> None:
    with engine() as made:
        unlock_routing(made, IDS)
        history = History(made, IDS)
        history.read(64)
        history.repeat(1024)
        before = made.counters()["kv"]["tokens"]
        said = {}
        for recent in (0, 32, 0, 1025):
            history.attend(recent, 0)
            _, logits, attention = history.decode([7, 8])
            assert attention > 0 and made.counters()["kv"]["tokens"] == before and history.length == 1024
            said.setdefault(recent, []).append(logits)
        assert np.array_equal(*said[0])  # nothing of a round is left for the next
        assert np.array_equal(said[1025][0][0], said[0][0][0])  # all is near
        assert not np.array_equal(said[32][0], said[0][0])
        shares = history.first_experts()
        assert shares.shape == (2, 8) and np.allclose(shares.sum(axis=1), 1)


def test_unlocked_gates_route_by_what_differs() -> None:
    """Random weights agree on a few experts; without the direction that all inputs share they use many."""
    spread = []
    with engine() as made:
        for unlock in (False, True):
            if unlock:
                unlock_routing(made, IDS)
            history = History(made, IDS)
            history.read(64)
            spread.append(float(history.first_experts().max()))
            history.close()
    assert spread[1] < spread[0]
