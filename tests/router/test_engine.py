"""Routers in the running engine: exact ones change nothing, and each switch is proved by a counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError
from colibri_lab.router.softmax import Softmax
from tests.makers import make
from tests.parity.models import engine, levels

PROMPT = "The captain looked at the sea and said"
Said = list[tuple[int, float, bytes, bytes]]
BACKENDS: list[dict[str, Any]] = [{"backend": "reference"}, *({"isa": level} for level in levels())]


class TopOfTwo:
    """A foreign router that is named in the settings: the exact choice, the other way round."""

    def select(self, layer: int, logits: np.ndarray) -> tuple[Any, Any]:
        experts, weights = Softmax(2, True).select(layer, logits)
        return experts[:, ::-1], weights[:, ::-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from colibri_lab.convert import convert
    from colibri_lab.paths import embedded_model

    return convert(embedded_model(), tmp_path_factory.mktemp("models") / "tiny-moe", quantize="int4")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that are not divided by their sum, so that every logit is needed."""
    from colibri_lab.convert import convert

    at = tmp_path_factory.mktemp("olmoe")
    return convert(make("olmoe", 5, norm_topk_prob=False).save(at / "hf"), at / "out", quantize="fp32")


def run(path: Path, prompt: Any = PROMPT, count: int = 16, **how: Any) -> tuple[Said, dict[str, Any], dict[str, Any]]:
    with engine(path, **how) as made:
        tokens = list(made.generate(prompt, max_tokens=count))
        said = [(t.id, t.logprob, t.experts.tobytes(), t.weights.tobytes()) for t in tokens]
        return said, made.counters()["router"], made.describe()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: "-".join(b.values()))
@pytest.mark.parametrize("bits", [None, 8, 12, 16])
def test_two_stage_changes_nothing(bits: int | None, backend: dict[str, Any], model: Path) -> None:
    count = 4 if backend.get("backend") == "reference" else 16
    right, plain, _ = run(model, count=count, **backend)
    said, c, facts = run(model, count=count, router="two_stage", router_quant_bits=bits, router_audit=True, **backend)
    assert said == right
    assert facts["router"] == "two_stage" and facts["router_quant_bits"] == (bits or 8) and facts["changes"] == []
    assert c["certified"] + c["fallback"] == c["selections"] == c["audited"] == plain["selections"]
    assert c["wrong_selections"] == 0 and c["certified"] > 0.9 * c["selections"]
    assert c["scored"] < 0.5 * plain["scored"]  # the gates' work is really spared
    assert plain["certified"] == plain["candidates"] == plain["audited"] == 0


def test_more_bits_leave_fewer_candidates(model: Path) -> None:
    counts = [run(model, router="two_stage", router_quant_bits=bits)[1]["candidates"] for bits in (8, 10, 12)]
    assert counts[0] > counts[1] > counts[2]


def test_two_stage_where_every_logit_is_needed(olmoe: Path) -> None:
    prompt = list(range(3, 30))
    right, plain, _ = run(olmoe, prompt)
    said, c, _ = run(olmoe, prompt, router="two_stage")
    assert said == right and c["certified"] > 0 and c["scored"] == plain["scored"]


@pytest.mark.parametrize("router", ["int8_lut", "bit_level"])
def test_approximate_routers_say_so(router: str, model: Path) -> None:
    right, _, _ = run(model)
    said, c, facts = run(model, router=router, router_audit=True)
    assert facts["changes"] == [f"router: {router} is approximate"] and facts["router"] == router
    assert [weights for *_, weights in said] != [weights for *_, weights in right]
    assert c["audited"] == c["selections"] and c["wrong_selections"] <= 0.05 * c["audited"]
    assert c["wrong_selections"] == 0 or router == "int8_lut"
    again, _, _ = run(model, router=router)
    assert again == said  # the audit only looks
    references = {run(model, router=router, isa=level, precision="exact")[0][0] for level in levels()}
    assert len(references) == 1  # one and the same at all ISA levels
    with engine(model, router=router) as made:
        assert "approximate" in repr(made) and "approximate" in made._repr_html_()


def test_int8_lut_is_nearer_with_more_bits(model: Path) -> None:
    wrong = [
        run(model, count=64, router="int8_lut", router_quant_bits=bits, router_audit=True)[1]["wrong_selections"]
        for bits in (8, 16)
    ]
    assert wrong[0] > wrong[1]


def test_another_k_is_another_model(model: Path) -> None:
    right, plain, _ = run(model)
    for k in (1, 3, 16):
        said, c, facts = run(model, router_top_k=k)
        assert facts["top_k"] == k and facts["model_top_k"] == 2 and "router_top_k" in facts["changes"][0]
        assert said != right and c["selections"] == plain["selections"]
        two, _, _ = run(model, router_top_k=k, router="two_stage")
        assert two == said
    with engine(model, router_top_k=2) as made:
        assert made.describe()["changes"] == [] and "changed" not in repr(made)
    with engine(model, router_top_k=1) as made:
        assert "changed by router_top_k: 1 experts a token instead of the model's 2" in repr(made)
        token = next(made.generate(PROMPT))
        assert token.experts.shape == (8, 1) and (token.weights == 1).all()
        assert made.counters()["dispatch"]["rows"] == made.counters()["router"]["selections"]


def test_k_past_the_experts_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="router_top_k: a layer has 16 experts, so k is at most that, not 17"):
        Engine.load(model, router_top_k=17)


def test_router_dtype_rounds_the_gates(model: Path) -> None:
    right, plain, _ = run(model)
    said, c, facts = run(model, router_dtype="int8")
    assert plain["rounded_weights"] == 0 < c["rounded_weights"] and "rounded to int8" in facts["changes"][0]
    assert said != right
    two, _, _ = run(model, router_dtype="int8", router="two_stage")
    assert two == said  # exact for the gate that there is
    same, c, _ = run(model, router_dtype="fp16")  # the checkpoint is fp16, so nothing is lost
    assert same == right and c["rounded_weights"] == 0


def test_logit_spans_are_reported(model: Path) -> None:
    with engine(model) as made:
        assert {layer["low"] for layer in made.describe()["router_layers"]} == {None}
        made.logits(list(range(3, 40)))
        layers = made.describe()["router_layers"]
        assert [layer["layer"] for layer in layers] == list(range(8))
        assert all(layer["low"] < 0 < layer["top"] and layer["warning"] is None for layer in layers)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: "-".join(b.values()))
def test_a_span_past_the_quantiser_is_a_warning(backend: dict[str, Any], tmp_path: Path) -> None:
    from colibri_lab.convert import convert

    made = make("mixtral", 6)
    for name, tensor in made.tensors.items():
        if name.endswith("gate.weight"):
            tensor *= 1e4
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    with engine(path, router="int8_lut", **backend) as wide:
        wide.logits(list(range(3, 30)))
        first = wide.describe()["router_layers"][0]
        assert first["saturated"] > 0.5 and "raise router_quant_bits" in first["warning"]
        assert wide.counters()["router"]["saturated"] > 0 and "raise router_quant_bits" in wide._repr_html_()
    with engine(path, router="bit_level", **backend) as wide:
        wide.logits(list(range(3, 30)))
        assert wide.describe()["router_layers"][0]["saturated"] > 0.1


def test_a_foreign_router_by_name_and_its_audit(model: Path) -> None:
    said, c, facts = run(model, router=f"{__name__}:TopOfTwo", router_audit=True)
    assert facts["router"] == "TopOfTwo" and c["audited"] == c["selections"] and c["wrong_selections"] == 0
    by_instance, c, _ = run(model, router=TopOfTwo())
    assert by_instance == said and c["audited"] == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:Router", "cannot be loaded: No module named"),
        (f"{__name__}:Missing", "cannot be loaded: module"),
        (f"{__name__}:PROMPT", "has no select"),
    ],
)
def test_wrong_names_are_one_line(name: str, says: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=f"router: .*{says}"):
        Engine.load(model, router=name)


def test_an_entry_point_names_a_router(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("top-of-two", f"{__name__}:TopOfTwo", "colibri_lab.routers")
    monkeypatch.setattr("colibri_lab.plugins.entry_points", lambda group: [point] if "routers" in group else [])
    assert run(model, router="top-of-two", count=2)[2]["router"] == "TopOfTwo"


def test_certificates_and_audit_are_shown(model: Path) -> None:
    with engine(model, router="two_stage", router_audit=True) as made:
        assert "rows certified" not in made._repr_html_()  # nothing was routed yet
        made.logits(list(range(3, 40)))
        page = made._repr_html_()
        assert "rows certified" in page and "candidates each" in page and "0% of 296 audited" in page


def test_more_experts_than_routers_take() -> None:
    from dataclasses import replace

    from colibri_lab.config import Config
    from colibri_lab.router.settle import settle_weights
    from tests.ops.models import Maker, Shape

    weights = Maker(Shape(experts=4)).weights()
    assert settle_weights(weights, Config.make({}))[0].routing is not None
    with pytest.raises(ConfigError, match="2049 experts a layer; routers take 2048 at most"):
        settle_weights(replace(weights, experts=2049), Config.make({}))


def test_a_k_of_hundreds(tmp_path: Path) -> None:
    """512 experts, 300 of them a token: every router runs, and a recording of it plays."""
    from colibri_lab.convert import convert
    from colibri_lab.recorded import replay
    from colibri_lab.trace import Recorder

    made = make("qwen3_moe", 8, num_experts=512, num_experts_per_tok=300, norm_topk_prob=True)
    path = convert(made.save(tmp_path / "hf"), tmp_path / "out", quantize="fp32")
    prompt = list(range(3, 9))
    right, _, _ = run(path, prompt, 2)
    assert run(path, prompt, 2, router="two_stage")[0] == right
    for router in ("int8_lut", "bit_level"):
        said, c, _ = run(path, prompt, 2, router=router, router_audit=True)
        assert len(said) == 2 and (c["wrong_selections"] == 0 or router == "int8_lut")
    with engine(path, telemetry=True) as traced:
        with Recorder(traced.telemetry, tmp_path / "run.jsonl"):
            list(traced.generate(prompt, max_tokens=2))
        assert replay(tmp_path / "run.jsonl").top_k == 300
