"""The softmax oracle, and routers from elsewhere running in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_lab.convert import convert
from colibri_lab.engine import Engine
from colibri_lab.errors import RequestError, RouterError
from colibri_lab.ops.types import NonFiniteLogits
from colibri_lab.paths import embedded_model
from colibri_lab.router.softmax import Softmax

F32 = np.float32


@pytest.mark.parametrize(
    ("top_k", "normalise", "expected"),
    [
        (2, False, [0.643914, 0.236883]),
        (2, True, [0.731059, 0.268941]),
        (1, False, [0.643914]),
        (1, True, [1.0]),
    ],
)
def test_softmax_over_all_then_choose(top_k: int, normalise: bool, expected: list[float]) -> None:
    experts, weights = Softmax(top_k, normalise).select(0, np.array([[2, 1, 0, -1]], F32))
    assert experts[0].tolist() == list(range(top_k)) and weights[0] == pytest.approx(expected, abs=1e-6)
    assert (experts.dtype, weights.dtype) == (np.int32, F32)


def test_ties_and_near_ties() -> None:
    assert Softmax(2, True).select(0, np.zeros((1, 8), F32))[0].tolist() == [[0, 1]]
    near = np.array([[1.0, 1.002, 0, 1.001]], F32)  # equal in bfloat16, not in float32
    assert Softmax(2, True).select(0, near)[0].tolist() == [[1, 3]]


def test_not_finite() -> None:
    logits = np.zeros((3, 4), F32)
    logits[1, :2] = -np.inf
    assert Softmax(2, True).select(0, logits)[0].tolist() == [[0, 1], [2, 3], [0, 1]]
    for bad in (np.nan, np.inf):
        logits[2, 1] = bad
        with pytest.raises(NonFiniteLogits, match="layer 5 are not finite for row 2"):
            Softmax(2, True).select(5, logits)


@given(st.integers(1, 64), st.data())
def test_any_logits(experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    logits = np.array(
        data.draw(
            st.lists(st.lists(st.floats(-80, 80, width=32), min_size=experts, max_size=experts), min_size=1, max_size=3)
        ),
        F32,
    )
    chosen, weights = Softmax(k, False).select(0, logits)
    for row, ids, share in zip(logits, chosen, weights, strict=True):
        assert ids.tolist() == sorted(range(experts), key=lambda e: (-row[e], e))[:k]
        whole = np.exp(row.astype(float) - row.max())
        assert share == pytest.approx((whole / whole.sum())[ids], rel=1e-5)
    assert np.allclose(Softmax(k, True).select(0, logits)[1].sum(axis=1), 1, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(embedded_model(), tmp_path_factory.mktemp("models") / "tiny-moe", quantize="int4")


def run(model: Path, router: Any, **settings: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    with Engine.load(model, threads=1, router=router, **settings) as engine:
        return list(engine.generate("The captain looked", max_tokens=12)), engine.describe(), engine.counters()


def test_the_oracle_as_a_foreign_router_changes_nothing(model: Path) -> None:
    fused, _, _ = run(model, "softmax")
    foreign, described, _ = run(model, Softmax(2, True))
    assert described["router"] == "Softmax"
    assert [t.id for t in foreign] == [t.id for t in fused]
    for a, b in zip(foreign, fused, strict=True):
        assert (a.experts == b.experts).all() and np.allclose(a.weights, b.weights, atol=1e-6)


def test_a_foreign_router_decides(model: Path) -> None:
    """The second and third best experts, by a router of ten lines: seen in tokens, pages and KV owners."""

    class NotTheBest:
        name = "not-the-best"
        calls = 0

        def select(self, layer: int, logits: np.ndarray) -> tuple[Any, Any]:
            self.calls += 1
            order = np.argsort(-logits, axis=1, kind="stable")[:, 1:3]
            logits[:] = 0  # its own copy
            return order, np.full(order.shape, 0.5)

    router = NotTheBest()
    tokens, described, counters = run(model, router, expert_cache_bytes="256KiB", prefill_chunk=2)
    fused, _, _ = run(model, "softmax")
    assert described["router"] == "not-the-best" and router.calls > 12 * 8
    assert [t.id for t in tokens] != [t.id for t in fused]
    assert all((t.weights == 0.5).all() for t in tokens)
    assert not (tokens[0].experts[0] == fused[0].experts[0]).all()
    assert counters["pager"]["faults"] > 0 and counters["router"]["selections"] == counters["dispatch"]["rows"] // 2
    again, _, _ = run(model, NotTheBest())
    assert [t.id for t in again] == [t.id for t in tokens]  # placement changes speed, never tokens


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda n: None, "no pair"),
        (lambda n: (np.zeros((n, 1), int), np.ones((n, 1))), r"must be \(\d+, 2\)"),
        (lambda n: (np.full((n, 2), 16), np.ones((n, 2))), "integers from 0 to 15"),
        (lambda n: (np.full((n, 2), 1.0), np.ones((n, 2))), "integers from 0 to 15"),
        (lambda n: (np.full((n, 2), 3), np.ones((n, 2))), "chose an expert twice"),
        (lambda n: (np.arange(2)[None].repeat(n, 0), np.full((n, 2), np.nan)), "finite"),
    ],
)
def test_nonsense_from_a_router_is_named(model: Path, answer: Any, says: str) -> None:
    class Wrong:
        def select(self, layer: int, logits: np.ndarray) -> Any:
            return answer(len(logits))

    with Engine.load(model, threads=1, router=Wrong()) as engine:
        with pytest.raises(RouterError, match=f"router Wrong, layer 0: .*{says}"):
            next(engine.generate("The sea"))
        assert engine.counters()["kv"]["slots_used"] == 0


def test_a_foreign_router_may_refuse(model: Path) -> None:
    class Refuses:
        def select(self, layer: int, logits: np.ndarray) -> Any:
            raise NonFiniteLogits(layer, len(logits) - 1)

    with (
        Engine.load(model, threads=1, router=Refuses()) as engine,
        pytest.raises(RequestError, match="layer 0 are not finite at position"),
    ):
        next(engine.generate("The sea"))
