"""C3, D1, D2, D4: which experts a token gets and with what weight, seen through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.model.store import ModelFile
from colibri_lab.ops.router_kernel import RouterKernel
from colibri_lab.ops.routing import COUNTS, Routing
from colibri_lab.router.softmax import Softmax
from tests.makers import ABSENT, make
from tests.oracle.goldens import error
from tests.oracle.numpy_oracle import Oracle
from tests.parity.models import engine, levels, logits

PROMPT = np.random.default_rng(2).integers(3, 60, 16).tolist()
BACKENDS: list[dict[str, Any]] = [{"backend": "reference"}, *({"isa": level} for level in levels())]
D1 = np.array([[2, 1, 0, -1]], np.float32)


@pytest.mark.parametrize(("normalise", "right"), [(False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])])
def test_d1_softmax_over_all_then_choose(normalise: bool, right: list[float]) -> None:
    experts, weights = Softmax(2, normalise).select(0, D1)
    assert experts.tolist() == [[0, 1]] and weights[0].tolist() == pytest.approx(right, abs=1e-6)
    _, one = Softmax(1, normalise).select(0, D1)
    assert one[0, 0] == pytest.approx(1.0 if normalise else 0.643914, abs=1e-6)
    if normalise:
        assert one[0, 0] == 1.0


@pytest.mark.parametrize("key", [False, True, ABSENT])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_d1_gate_weights_of_the_engine(family: str, top_k: int, key: Any, tmp_path: Path) -> None:
    """Token.experts and .weights equal the oracle's, also with the key absent. Mixtral has no key and renormalises."""
    overrides = {} if family == "mixtral" else {"norm_topk_prob": key}
    made = make(family, 31, num_experts_per_tok=top_k, **overrides)
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    _, routing = Oracle(made.config, made.tensors).forward(PROMPT)
    sums_to_one = family == "mixtral" or key is True
    for backend in BACKENDS:
        with engine(path, **backend) as model:
            token = next(iter(model.generate(PROMPT, max_tokens=1)))
        assert token.experts.tolist() == [experts[-1].tolist() for experts in routing.experts]
        right = np.stack([weights[-1] for weights in routing.weights])
        assert np.abs(token.weights - right).max() < 1e-5
        assert np.allclose(token.weights.sum(1), 1, atol=1e-6) == sums_to_one
        if top_k == 1 and sums_to_one:
            assert (token.weights == 1.0).all()


@pytest.mark.parametrize(("normalise", "right"), [(False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])])
@pytest.mark.parametrize("kind", ["softmax", "int8_lut", "bit_level", "two_stage"])
@pytest.mark.parametrize("level", levels())
def test_d1_every_router_softmaxes_over_all(level: str, kind: str, normalise: bool, right: list[float]) -> None:
    """The kernels alone: 12 bits are right to 1e-3, two_stage to the last place of exp."""
    made = RouterKernel(Routing.make(1, kind, 12), 4, 2, normalise, 1, D1.T.copy(), level)
    made.x[:] = 1
    made.run(score=True)
    assert made.experts.tolist() == [[0, 1]]
    near = 1e-3 if kind in ("int8_lut", "bit_level") else 1e-6
    assert made.weights[0].tolist() == pytest.approx(right, abs=near)


@pytest.mark.parametrize("kind", ["softmax", "int8_lut", "bit_level", "two_stage"])
@pytest.mark.parametrize("level", levels())
def test_d2_every_router_gives_ties_to_the_lowest_index(level: str, kind: str) -> None:
    made = RouterKernel(Routing.make(1, kind, 8), 8, 2, True, 20, np.zeros((8, 16), np.float32), level)
    made.x[:] = np.random.default_rng(1).standard_normal(made.x.shape)
    made.run(score=True)
    assert (made.experts == [0, 1]).all() and (made.weights == 0.5).all()


@pytest.mark.parametrize("kind", ["softmax", "bit_level", "two_stage"])
@pytest.mark.parametrize("level", levels())
def test_d2_near_ties_in_every_exact_selection(level: str, kind: str) -> None:
    """int8_lut is the control: its 255 steps between -1 and 1.002 cannot tell the three apart, and it says so."""
    gate = np.array([[1.0], [1.002], [0], [1.001]], np.float32)
    made = RouterKernel(Routing.make(1, kind, 8, True), 4, 2, True, 1, gate, level)
    made.x[:] = 1
    made.run(score=True)
    assert made.experts.tolist() == [[1, 3]] and made.routing.counts[0, COUNTS.index("wrong_selections")] == 0
    gate[2] = -1
    rough = RouterKernel(Routing.make(1, "int8_lut", 8, True), 4, 2, True, 1, gate, level)
    rough.x[:] = 1
    rough.run(score=True)
    assert rough.experts.tolist() == [[0, 1]] and rough.routing.counts[0, COUNTS.index("wrong_selections")] == 1


@pytest.fixture(scope="module")
def ties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router of zeros: every expert scores 0 for every token."""
    made = make("mixtral", 32)
    for name in made.tensors:
        if name.endswith("gate.weight"):
            made.tensors[name][:] = 0
    at = tmp_path_factory.mktemp("ties")
    return convert(made.save(at / "hf"), at / "out", quantize="fp32")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: "-".join(map(str, b.values())))
def test_d2_ties_go_to_the_lowest_index(backend: dict[str, Any], threads: int, ties: Path) -> None:
    """Twenty tokens, prefill and decode: always experts 0 and 1 with weight one half, to the bit."""
    with engine(ties, threads=threads, prefill_chunk=4, **backend) as model:
        for token in model.generate(PROMPT, max_tokens=20):
            assert (token.experts == [0, 1]).all()
            assert (token.weights == 0.5).all()


def test_d2_near_ties_are_decided_unrounded() -> None:
    """[1.0, 1.002, 0, 1.001]: bfloat16 would make three of them equal, and a stable sort would then pick 0 and 1."""
    logits_ = np.array([[1.0, 1.002, 0, 1.001]], np.float32)
    assert Softmax(2, True).select(0, logits_)[0].tolist() == [[1, 3]]
    rounded = (logits_.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)
    assert Softmax(2, True).select(0, rounded)[0].tolist() == [[0, 1]]  # control


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: "-".join(map(str, b.values())))
def test_d2_near_ties_in_the_kernels(backend: dict[str, Any], tmp_path: Path) -> None:
    """Router rows 1.0, 1.002, 0, 1.001 times one row: a positive score chooses 1 and 3, a negative one 2 and 0."""
    made = make("mixtral", 33, num_local_experts=4)
    scale = np.array([1.0, 1.002, 0, 1.001], np.float32)
    for name in made.tensors:
        if name.endswith("gate.weight"):
            made.tensors[name][:] = made.tensors[name][0] * scale[:, None]
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    chosen = set()
    with engine(path, **backend) as model:
        for token in model.generate(PROMPT, max_tokens=20):
            chosen |= {tuple(row) for row in token.experts.tolist()}
    assert chosen == {(1, 3), (2, 0)}


def test_c3_router_and_shared_gate_are_not_squeezed(tmp_path: Path) -> None:
    """32 experts, as many as a group is wide, and router rows that differ by 0.5 %: int4 must not touch them."""
    made = make("qwen2_moe", 34, num_experts=32, exact="int4")
    for name in made.tensors:
        if name.endswith("mlp.gate.weight"):
            base = made.tensors[name][0]
            steps = np.random.default_rng(3).permutation(32)[:, None]
            made.tensors[name][:] = base * (1 + 0.005 * steps).astype(np.float32)
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="int4")
    oracle = Oracle(made.config, made.tensors)
    with ModelFile.open(path) as file:
        layers = file.weights().layers
    for i, layer in enumerate(layers):
        assert layer.gate is not None and layer.shared_gate is not None and layer.shared is not None
        assert np.array_equal(layer.gate, made.tensors[f"model.layers.{i}.mlp.gate.weight"])
        assert np.array_equal(layer.shared_gate, made.tensors[f"model.layers.{i}.mlp.shared_expert_gate.weight"][0])
        assert {m.layout.dtype for m in (layer.shared.gate, layer.shared.up, layer.shared.down)} == {"int4"}
    ids = np.random.default_rng(4).integers(3, 60, 250).tolist()
    with engine(path, telemetry=True) as model:
        cursor = model.telemetry.cursor()
        assert error(logits(model, ids), oracle.forward(ids)[0]) < 1e-5
        list(model.generate(ids, max_tokens=1))
        batch = model.telemetry.read(cursor)
    route = batch.route[np.argsort(batch.tokens["position"])]
    assert len(route) == len(ids)
    _, routing = oracle.forward(ids)
    checked = 0
    for layer, (experts, scores) in enumerate(zip(routing.experts, routing.logits, strict=True)):
        ranked = -np.sort(-scores, axis=1)
        clear = ranked[:, 1] - ranked[:, 2] > 1e-4  # positions where float32 sums cannot decide otherwise
        same = (np.sort(route[:, layer], 1) == np.sort(experts, 1)).all(1)
        assert same[clear].all()
        checked += int(clear.sum())
    assert checked > 400
    squeezed = {name: four_bits(tensor) for name, tensor in made.tensors.items() if "mlp.gate.weight" in name}
    _, noise = Oracle(made.config, {**made.tensors, **squeezed}).forward(ids)
    assert any((a != b).any() for a, b in zip(noise.experts, routing.experts, strict=True))  # control


def four_bits(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rounded to sixteen steps a row, as a careless converter would."""
    step = np.abs(tensor).max(1, keepdims=True) / 8
    return np.round(tensor / step) * step


def shared_only(gate: float) -> tuple[Any, Any]:
    """(checkpoint, oracle) whose routed experts give nothing and whose shared gate is `gate` times the first input."""
    made = make("qwen2_moe", 35)
    for name, tensor in made.tensors.items():
        if ".experts." in name and name.endswith("down_proj.weight"):
            tensor[:] = 0
        if name.endswith("shared_expert_gate.weight"):
            tensor[:] = 0
            tensor[0, 0] = gate
    return made, Oracle(made.config, made.tensors)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: "-".join(map(str, b.values())))
@pytest.mark.parametrize("gate", [0.0, 20.0, -20.0])
def test_d4_shared_experts_own_gate(gate: float, backend: dict[str, Any], tmp_path: Path) -> None:
    """Prefill in one batch, in chunks, decode, cold and warm cache: all weigh the shared expert by its sigmoid."""
    made, oracle = shared_only(gate)
    right = oracle.logits(PROMPT)
    assert error(Oracle(made.config, made.tensors, {"no_shared_gate"}).logits(PROMPT), right) > 1e-2  # control
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    with engine(path, prefill_chunk=5, **backend) as model:
        cold, warm = logits(model, PROMPT), logits(model, PROMPT)
        assert error(cold, right) < 1e-5 and np.array_equal(cold, warm)
        tokens = [token.id for token in model.generate(PROMPT, max_tokens=8)]
        counted = model.counters()
    assert tokens == oracle.greedy(PROMPT, 8)[0]
    rows = 2 * len(PROMPT) + len(PROMPT) + 8 - 1
    assert counted["router"]["selections"] == rows * 2  # one choice a row and layer,
    assert counted["dispatch"]["rows"] == rows * 2 * 2  # of top-2: the shared expert is no routed choice
    assert counted["pager"]["faults"] <= 16  # and takes no frame


def test_d4_the_shared_output_is_halved_by_a_zero_gate(tmp_path: Path) -> None:
    """With a zero gate, doubling the shared down projection equals no gate at all: 0.5 x 2 = 1."""
    made, _ = shared_only(0.0)
    right = Oracle(made.config, made.tensors, {"no_shared_gate"}).logits(PROMPT)
    for name, tensor in made.tensors.items():
        if name.endswith("shared_expert.down_proj.weight"):
            tensor *= 2
    with engine(convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")) as model:
        assert error(logits(model, PROMPT), right) < 1e-5
