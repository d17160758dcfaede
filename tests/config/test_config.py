"""config.yaml: every key is checked, every error is one line that names file and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.config import Config
from colibri_lab.errors import ConfigError
from colibri_lab.pager.policy import LRU
from colibri_lab.router.softmax import Softmax
from colibri_lab.yamlfile import parse_mapping

KEYS = """
    model_path tokenizer_path backend precision threads engine_mode max_batch_size batch_adapt_interval_ms prefill_chunk
    expert_cache_bytes eviction_policy prefetcher expert_prefetch_pages pin_after_tokens pin_max_share io_threads
    io_priority cpu_affinity_mask router router_top_k router_dtype router_quant_bits router_audit attention
    kv_cache_dtype kv_cache_slot_size kv_cache_max_slots kv_cache_persistence_path kv_cache_quota_bytes
    dispatch_ring_size dispatch_watermark expert_placement gpu_cache_bytes cuda_graphs gpu_reset_on_exit
    telemetry pace
""".split()


def test_every_promised_key_exists_with_its_facts() -> None:
    for name in KEYS:
        assert name in Config.model_fields
        assert Config.model_fields[name].description and Config.fact(name, "section")
    assert set(Config.live_keys()) == {
        "batch_adapt_interval_ms",
        "expert_cache_bytes", "eviction_policy", "pace", "max_batch_size", "prefetcher", "prefill_chunk",
        "telemetry_top_logprobs",
    }  # fmt: skip
    properties = json.loads(json.dumps(Config.model_json_schema()))["properties"]
    assert properties["kv_cache_max_slots"]["default"] == 2048
    assert properties["expert_cache_bytes"]["live"] and properties["expert_cache_bytes"]["unit"] == "bytes"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("64kb", 64_000), ("10", 10), (4096, 4096), ("3 B", 3), ("0", 0)],
)
def test_sizes(text: object, size: int) -> None:
    assert Config.make({"expert_cache_bytes": text}).expert_cache_bytes == size


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"expert_cache_byte": 1}, "did you mean expert_cache_bytes?"),
        ({1: 2}, "unknown key 1"),
        ({"threads": True}, "threads: input should be a valid integer, not True"),
        ({"threads": "2"}, "threads"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"expert_cache_bytes": "12 parsecs"}, "512MiB"),
        ({"expert_cache_bytes": -1}, "expert_cache_bytes"),
        ({"expert_cache_bytes": float("nan")}, "expert_cache_bytes"),
        ({"backend": "gpu"}, "backend"),
        ({"pace": 0}, "pace"),
        ({"router": "magic"}, "neither softmax, int8_lut, bit_level, two_stage nor an object with select()"),
        ({"router": Softmax}, "two_stage nor an object with select()"),
        (
            {"eviction_policy": 3},
            "neither lru, lfu, lfru, slru, least_stale nor an object with hit(), admit(), victim(), forget()",
        ),
        ({"prefetcher": "psychic"}, "history, next_gate, second_gate nor an object with guess()"),
        ({"prefetcher": "next_gate+psychic"}, "'next_gate+psychic' is neither none, neighbour"),
        ({"prefetcher": "history+history"}, "'history+history' is neither none, neighbour"),
        ({"prefetcher": "none+history"}, "'none+history' is neither none, neighbour"),
        ({"prefetcher": "history+"}, "'history+' is neither none, neighbour"),
        ({"prefetcher": 3}, "neither none, neighbour, history, next_gate, second_gate nor an object with guess()"),
        ({"pin_after_tokens": 0}, "greater than or equal to 1"),
        ({"pin_max_share": 1.5}, "less than or equal to 1"),
        ({"expert_prefetch_pages": -1}, "greater than or equal to 0"),
        ({"eviction_policy": LRU}, "least_stale nor an object with"),
        ({"eviction_policy": Softmax(2, True)}, "least_stale nor an object with"),
        ({"model_path": 3}, "model_path"),
        ({"router_quant_bits": 8}, "router 'softmax' has no codes"),
        ({"router_quant_bits": 9, "router": "bit_level"}, "router 'bit_level' has no codes"),
        ({"router_quant_bits": 7, "router": "two_stage"}, "greater than or equal to 8"),
        ({"router_top_k": 0}, "greater than or equal to 1"),
        ({"router_dtype": "fp8"}, "router_dtype"),
        ({"io_priority": "highest"}, "io_priority"),
        ({"cpu_affinity_mask": 0}, "greater than or equal to 1"),
        ({"cpu_affinity_mask": "3"}, 'cpu_affinity_mask: a mask of cores is a number or like "0x3"'),
        ({"cpu_affinity_mask": True}, "cpu_affinity_mask"),
    ],
)
def test_wrong_values_are_one_line(values: dict, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.make(values, "some.yaml")
    assert says in str(error.value) and str(error.value).startswith("some.yaml: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on"), ("no", "off")]
)
def test_a_switch_as_yaml_writes_it(tmp_path: Path, text: str, value: str) -> None:
    (tmp_path / "config.yaml").write_text(f"cuda_graphs: {text}\n")
    assert Config.from_yaml(tmp_path / "config.yaml").cuda_graphs == value


def test_yaml_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model_path: models/tiny\nexpert_cache_bytes: 8MiB\nmax_batch_size: 2\n")
    config = Config.from_yaml(file, max_batch_size=4)
    assert config.model_path == tmp_path / "models" / "tiny"
    assert (config.expert_cache_bytes, config.max_batch_size, config.threads) == (8 << 20, 4, None)
    with pytest.raises(ConfigError, match="max_batch_size"):
        config.replace(max_batch_size=0)
    with pytest.raises(ConfigError, match=r"cannot be read"):
        Config.from_yaml(tmp_path / "none.yaml")
    file.write_text("threads: 1\nthreads: 2\n")
    with pytest.raises(ConfigError, match=r"config.yaml: line 2: the key 'threads' is given twice"):
        Config.from_yaml(file)
    assert "<b>8388608</b>" in config._repr_html_()


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().threads = 3  # type: ignore[misc]


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.binary(max_size=200), st.text("ab:[]{}-&*!|>'\"# \n\t0123.e_<~?,%@`=", max_size=120).map(str.encode))
)
def test_any_bytes_give_settings_or_one_clear_line(data: bytes) -> None:
    try:
        config = Config.make(parse_mapping(data, "f.yaml"), "f.yaml")
    except ConfigError as error:
        assert str(error).startswith("f.yaml:") and "\n" not in str(error) and len(str(error)) < 3000
    else:
        assert isinstance(config, Config)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 3000,
        b"a: &a [x, x]\nb: &b [*a, *a]\nthreads: [*b, *b]",
        b"? [1]\n: 2",
        b"\xff\xfe\x00",
        b"- 1",
        b"threads: " + b"9" * 9999,
    ],
)
def test_hostile_yaml(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml"):
        Config.make(parse_mapping(data, "f.yaml"), "f.yaml")
