"""Any config.json, any stored spec, any bytes: right, or refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.model.errors import ModelError
from colibri_lab.model.families import FAMILIES, read_spec
from colibri_lab.model.jsonfile import dumps, parse_object
from colibri_lab.model.spec import ModelSpec
from tests.makers import base_config


def spec(family: str = "mixtral", generation: dict[str, Any] | None = None, **overrides: Any) -> ModelSpec:
    return read_spec(base_config(family, **overrides), "config.json", generation)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_config_is_right_or_refused(data: st.DataObject) -> None:
    config = base_config(data.draw(st.sampled_from(sorted(FAMILIES))))
    keys = sorted({*config, "head_dim", "rope_scaling", "layer_types", "max_window_layers", "clip_qkv", "num_experts"})
    config |= data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=3))
    if data.draw(st.booleans()):
        kinds = st.sampled_from(["yarn", "linear", "default"]) | JSON
        config["rope_scaling"] = {"type": data.draw(kinds), "factor": data.draw(JSON), "rope_theta": data.draw(JSON)}
    try:
        got = read_spec(config, "config.json", {"eos_token_id": data.draw(JSON)})
    except ModelError as error:
        assert "\n" not in str(error)
        return
    assert ModelSpec.from_json(json.loads(dumps(got.to_json()))) == got


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_spec_json_is_right_or_refused(data: st.DataObject) -> None:
    facts = spec("qwen2_moe").to_json()
    facts |= data.draw(st.dictionaries(st.sampled_from(sorted(facts)), JSON, max_size=2))
    facts["rope"] = data.draw(st.just(facts["rope"]) | JSON)
    try:
        got = ModelSpec.from_json(facts)
    except ModelError:
        return
    assert ModelSpec.from_json(got.to_json()) == got


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data, "x"), dict)
    except ModelError as error:
        assert "\n" not in str(error)


def test_deep_json_is_refused() -> None:
    with pytest.raises(ModelError, match="not JSON"):
        parse_object(b"[" * 200_000, "x")
