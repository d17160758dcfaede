"""The C routers against their NumPy references, at every ISA level: any number of experts, any k, ties, -inf, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.ops import route
from colibri_lab.ops.isa import available
from colibri_lab.ops.router_kernel import RouterKernel
from colibri_lab.ops.routing import COUNTS, Routing, gate_codes
from colibri_lab.ops.types import NonFiniteLogits
from colibri_lab.router.bit_level import BitLevel
from colibri_lab.router.int8_lut import Int8Lut
from colibri_lab.router.softmax import Softmax
from colibri_lab.router.two_stage import TwoStage

LEVELS = available()
ON_LOGITS = ("softmax", "int8_lut", "bit_level")


def counted(routing: Routing) -> dict[str, int]:
    return dict(zip(COUNTS, routing.counts[0].tolist(), strict=True))


def kernel(kind: str, logits: Any, k: int, normalise: bool, level: str, bits: int = 8) -> RouterKernel:
    made = RouterKernel(Routing.make(1, kind, bits, True), logits.shape[1], k, normalise, len(logits), isa=level)
    made.logits[:] = logits
    made.run()
    return made


def reference(kind: str, row: Any, k: int, normalise: bool, bits: int) -> route.Choice:
    if kind == "int8_lut":
        return route.int8_lut(row, k, normalise, bits)
    return route.bit_level(row, k, normalise) if kind == "bit_level" else route.softmax(row, k, normalise)


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Logits [R, E] with ties, shut-out experts, tiny and huge spans; and k."""
    experts = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 128, 255, 256, 512])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((draw(st.integers(1, 6)), experts)) * draw(st.sampled_from([0, 1e-3, 1, 3, 40, 1e6, 1e38]))
    if draw(st.booleans()):
        x = np.round(x * 2) / 2  # ties
    logits = np.clip(x, -3e38, 3e38).astype(np.float32)
    if draw(st.booleans()):
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, rng.integers(experts)] = 0
    return logits, draw(st.integers(1, min(experts, 24)) if draw(st.booleans()) else st.integers(1, experts))


@settings(max_examples=150, deadline=None)
@given(rows(), st.sampled_from(ON_LOGITS), st.booleans(), st.integers(8, 16), st.sampled_from(LEVELS))
def test_kernels_equal_the_reference(made: Any, kind: str, normalise: bool, bits: int, level: str) -> None:
    logits, k = made
    got = kernel(kind, logits, k, normalise, level, bits)
    seen: dict[str, int] = {}
    for r, row in enumerate(logits):
        want = reference(kind, row, k, normalise, bits)
        assert got.experts[r].tolist() == want.experts.tolist()
        assert np.allclose(got.weights[r], want.weights, rtol=2e-5, atol=1e-7)
        for name, n in want.counted.items():
            seen[name] = seen.get(name, 0) + n
    assert {name: counted(got.routing)[name] for name in seen} == seen
    finite = logits[np.isfinite(logits)]
    assert got.routing.span[0].tolist() == [finite.min(), finite.max()]


@settings(max_examples=60, deadline=None)
@given(rows(), st.sampled_from(ON_LOGITS), st.booleans(), st.integers(8, 16))
def test_levels_agree_bit_for_bit(made: Any, kind: str, normalise: bool, bits: int) -> None:
    logits, k = made
    all_ = [kernel(kind, logits, k, normalise, level, bits) for level in LEVELS]
    for other in all_[1:]:
        assert other.experts.tobytes() == all_[0].experts.tobytes()
        assert other.weights.tobytes() == all_[0].weights.tobytes()
        assert (other.routing.counts == all_[0].routing.counts).all()


@settings(max_examples=60, deadline=None)
@given(rows(), st.booleans(), st.sampled_from(LEVELS))
def test_bit_level_never_chooses_a_wrong_set(made: Any, normalise: bool, level: str) -> None:
    logits, k = made
    got, exact = kernel("bit_level", logits, k, normalise, level), Softmax(k, normalise).select(0, logits)[0]
    assert got.experts.tolist() == exact.tolist()
    assert counted(got.routing)["wrong_selections"] == 0 and counted(got.routing)["audited"] == len(logits)


def test_int8_lut_is_wrong_where_codes_meet_and_says_so() -> None:
    """Two logits within a step of the codes: the lower index wins, and the audit counts the row."""
    logits = np.array([[0, 2.999, 3.0, -1]], np.float32)
    got = kernel("int8_lut", logits, 1, True, LEVELS[0])
    assert got.experts.tolist() == [[1]] and counted(got.routing)["wrong_selections"] == 1
    finer = kernel("int8_lut", logits, 1, True, LEVELS[0], 16)
    assert finer.experts.tolist() == [[2]] and counted(finer.routing)["wrong_selections"] == 0


@pytest.mark.parametrize("kind", ["int8_lut", "bit_level"])
@pytest.mark.parametrize("normalise", [True, False])
def test_weights_are_near_softmax(kind: str, normalise: bool) -> None:
    logits = np.random.default_rng(1).standard_normal((500, 64)).astype(np.float32) * 2
    got, (_, weights) = kernel(kind, logits, 4, normalise, LEVELS[0], 12), Softmax(4, normalise).select(0, logits)
    assert np.abs(got.weights - weights).max() < 2e-3
    assert np.abs(got.weights - weights).max() > 0


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_two_stage_is_softmax_to_the_bit(data: st.DataObject) -> None:
    """Random and clustered gates, any width: ids and weights of softmax; candidates of kernel and reference agree."""
    experts = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 256, 512])))
    hidden, k = data.draw(st.integers(1, 200)), data.draw(st.integers(1, experts))
    bits, normalise = data.draw(st.integers(8, 16)), data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    gate = rng.standard_normal((experts, hidden)).astype(np.float32)
    gate *= data.draw(st.sampled_from([1e-38, 1e-20, 0.02, 1, 1e18])) * np.exp(rng.standard_normal((experts, 1)))
    if data.draw(st.booleans()):  # rows that hardly differ, and equal ones
        gate[:] = gate[0] + gate * data.draw(st.sampled_from([0, 1e-7, 1e-3]))
    if data.draw(st.booleans()):
        gate[rng.integers(experts), rng.integers(hidden)] = -np.inf
    x = rng.standard_normal((4, hidden)).astype(np.float32)
    x *= np.float32(data.draw(st.sampled_from([1e-14, 1, 1e16])))
    x[3] = np.abs(x[3])
    level = data.draw(st.sampled_from(LEVELS))
    for row in x:
        two, soft = (
            RouterKernel(Routing.make(1, kind, bits, True), experts, k, normalise, 1, gate, level)
            for kind in ("two_stage", "softmax")
        )
        two.x[:] = soft.x[:] = row
        found, fast = route.first_stage(gate_codes(gate, bits), row, k, bits)
        two.first_stage(1)
        assert two.experts[0].tolist() == fast.tolist() and not two.routing.counts.any()
        try:
            soft.run(score=True)
        except NonFiniteLogits:
            with pytest.raises(NonFiniteLogits):
                two.run(score=True)
            continue
        two.run(score=True)
        assert two.experts.tobytes() == soft.experts.tobytes() and two.weights.tobytes() == soft.weights.tobytes()
        c = counted(two.routing)
        assert c["certified"] + c["fallback"] == 1 and c["wrong_selections"] == 0 and c["audited"] == 1
        assert c["candidates"] == (0 if found is None else len(found))
        if found is not None:
            assert set(soft.experts[0].tolist()) | set(fast.tolist()) <= set(found.tolist())
            assert c["scored"] == (len(found) if normalise else experts)


def test_two_stage_spares_most_of_the_work_and_falls_back() -> None:
    rng = np.random.default_rng(3)
    gate, x = rng.standard_normal((128, 512)).astype(np.float32), rng.standard_normal((200, 512)).astype(np.float32)
    made = RouterKernel(Routing.make(1, "two_stage", 12, True), 128, 8, True, 200, gate)
    made.x[:] = x
    made.run(score=True)
    c = counted(made.routing)
    assert c["certified"] == 200 and c["scored"] < 200 * 16 and c["wrong_selections"] == 0
    close = gate[0] + gate * np.float32(1e-6)
    made = RouterKernel(Routing.make(1, "two_stage", 8, True), 128, 8, True, 200, close)
    made.x[:] = x
    made.run(score=True)
    assert counted(made.routing)["fallback"] == 200 and counted(made.routing)["wrong_selections"] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(8, 16), st.integers(1, 300), st.sampled_from([1e-3, 1.0, 1e4]))
def test_the_bound_holds(seed: int, bits: int, hidden: int, size: float) -> None:
    """The certificate's interval holds the exact product, computed in float64: the derivation, checked."""
    rng = np.random.default_rng(seed)
    gate = (rng.standard_normal((20, hidden)) ** 3 * size).astype(np.float32)
    x = (rng.standard_normal(hidden) ** 3).astype(np.float32)
    codes, bits_x = gate_codes(gate, bits), min(bits, 12)
    t = np.abs(x).max() / np.float32(2 ** (bits_x - 1) - 1)
    p = np.rint(x * ((2 ** (bits_x - 1) - 1) / np.abs(x).max()))
    near = codes.facts[:, 0] * float(t) * (codes.codes[:20, :hidden].astype(np.int64) @ p.astype(np.int64))
    norm, rest = np.linalg.norm(x.astype(np.float64)), np.linalg.norm(x - p * float(t))
    bound = codes.facts[:, 1] * norm + codes.facts[:, 2] * (rest + norm * 1e-6)
    assert (np.abs(gate.astype(np.float64) @ x - near) <= bound).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ON_LOGITS)
@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [1, 2, np.inf], [-np.inf] * 3, [1, -np.nan, 0]])
def test_no_right_choice_is_named_by_row(bad: list[float], kind: str, level: str) -> None:
    logits = np.array([[1, 2, 3], bad, [3, 2, 1]], np.float32)
    with pytest.raises(NonFiniteLogits) as caught:
        kernel(kind, logits, 2, True, level)
    assert caught.value.row == 1
    for made in (Softmax(2, True), Int8Lut(2, True), BitLevel(2, True)):
        with pytest.raises(NonFiniteLogits):
            made.select(0, logits)


def test_references_as_routers() -> None:
    logits = np.random.default_rng(0).standard_normal((30, 16)).astype(np.float32)
    exact = Softmax(2, True).select(0, logits)
    assert (BitLevel(2, True).select(0, logits)[0] == exact[0]).all()
    assert (Int8Lut(2, True, 16).select(0, logits)[0] == exact[0]).all()
    gate, x = np.eye(16, dtype=np.float32), logits[0]
    choice = TwoStage(gate, 2, True).choose(x)
    assert choice.experts.tolist() == exact[0][0].tolist() and choice.counted["certified"] == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Routing.make(1, "magic"), "none of softmax"),
        (lambda: RouterKernel(Routing.make(1), 2049, 2, True, 1), "at most 2048"),
        (lambda: Routing.make(1, "int8_lut", 7), "8 to 16 bits"),
        (lambda: RouterKernel(Routing.make(1, "two_stage"), 4, 2, True, 1), "needs a gate"),
        (lambda: RouterKernel(Routing.make(1), 4, 2, True, 1).first_stage(1), "softmax has no first stage"),
        (lambda: RouterKernel(Routing.make(1), 4, 5, True, 1), "from 1 to the 4"),
        (lambda: RouterKernel(Routing.make(1), 4, 2, True, 1).run(2), "room for 1"),
        (lambda: RouterKernel(Routing.make(1), 4, 2, True, 1).run(score=True), "needs a gate"),
    ],
)
def test_refused(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrong()
