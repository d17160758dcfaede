"""Every key of config.yaml, once: type, unit, default, range, what it does, and whether a running engine takes it.

The same keys are the keyword overrides of `Engine.load` and the names of `engine.settings`. The lab makes its sliders
from `Config.model_json_schema()`: each property carries `section`, `unit` and `live`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import plugins
from .combined import refuse_combinations
from .errors import ConfigError
from .refusals import in_words
from .settings_table import settings_table
from .sizes import CoreMask, FilePath, Size, Switch

ROUTERS = ("softmax", "int8_lut", "bit_level", "two_stage")
EVICTION = ("lru", "lfu", "lfru", "slru", "least_stale")
PREFETCH = ("none", "neighbour", "history", "next_gate", "second_gate")
# keys that take a name or an object with these methods
OBJECTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("eviction_policy", EVICTION, ("hit", "admit", "victim", "forget")),
    ("prefetcher", PREFETCH, ("guess",)),
    ("router", ROUTERS, ("select",)),
)


def key(default: Any, description: str, *, section: str, unit: str = "", live: bool = False, **more: Any) -> Any:
    """One key. `options`: names to choose from where the type says nothing of them."""
    extra: dict[str, Any] = {"section": section, "unit": unit, "live": live}
    if "options" in more:
        extra["options"] = more.pop("options")
    return Field(default, description=description, json_schema_extra=extra, **more)


class Config(BaseModel):
    """All settings of an engine; frozen. Make a changed copy with `config.replace(key=value)`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    model_path: FilePath | None = key(None, "folder (Hugging Face or converted) or .colibri file", section="model")
    tokenizer_path: FilePath | None = key(None, "folder with the tokenizer; none: the model's folder", section="model")
    quantize: Literal["fp32", "fp16", "int8", "int4"] | None = key(
        None, "weights of a Hugging Face folder when it is converted on first use; none: int4", section="model"
    )
    group_size: Literal[32, 64, 128] | None = key(
        None,
        "inputs that share one scale when a folder is converted on first use; none: 32",
        section="model",
        unit="weights",
    )
    backend: Literal["auto", "cuda", "cpu", "reference", "sim"] = key(
        "auto",
        "where the numbers are computed; auto: cuda where a GPU can be used, else cpu; sim: the CUDA kernels, thread "
        "by thread on the CPU, for tests",
        section="engine",
    )
    precision: Literal["fast", "exact"] = key(
        "fast", "fast: int8 activations for int8 and int4 weights; exact: fp32 activations", section="engine"
    )
    threads: int | None = key(None, "compute threads; none: all usable cores", section="engine", ge=1, le=256)
    engine_mode: Literal["sync", "async"] = key(
        "sync", "sync: stages in order; async: stages as a pipeline", section="engine"
    )
    max_batch_size: int = key(
        8,
        "sequences that advance together; live up to the value at load",
        section="engine",
        unit="sequences",
        live=True,
        ge=1,
        le=256,
    )
    batch_adapt_interval_ms: int | None = key(
        None,
        "how often the batch size follows the machine: halved above 85 % of memory, one more while the processor idles "
        "above 30 % and requests wait; none: off, 500 is a good choice",
        section="engine",
        unit="ms",
        live=True,
        ge=1,
    )
    prefill_chunk: int = key(
        64,
        "prompt tokens per step; live up to the value at load",
        section="engine",
        unit="tokens",
        live=True,
        ge=1,
        le=4096,
    )
    expert_cache_bytes: Size | None = key(
        None,
        "memory for expert pages; none: half of the free memory, at most all experts",
        section="pager",
        unit="bytes",
        live=True,
        ge=0,
    )
    eviction_policy: Any = key(
        "lfru",
        "which expert leaves a full cache: lru, lfu, lfru, slru, least_stale or a Policy object; "
        "a new one in a running engine begins without history",
        section="pager",
        options=[*EVICTION],
        live=True,
    )
    prefetcher: Any = key(
        "none",
        "which experts are read before they are asked for: none, neighbour, history, next_gate, second_gate, several "
        "as next_gate+history (most trusted first), or a Prefetcher object; a new one in a running engine begins "
        "without history; with router two_stage, any of them lets its first stage begin reads",
        section="pager",
        options=[*PREFETCH, "next_gate+history", "next_gate+second_gate"],
        live=True,
    )
    expert_prefetch_pages: int | None = key(
        None,
        "pages read ahead at a time, whole experts; none: log2 of the context's length, at least the rows' experts",
        section="pager",
        unit="pages",
        ge=0,
    )
    pin_after_tokens: int | None = key(
        100,
        "pin an expert that so many consecutive tokens used, until half as many did without; none: off",
        section="pager",
        unit="tokens",
        ge=1,
    )
    pin_max_share: float = key(0.25, "largest pinned share of the cache", section="pager", ge=0, le=1)
    io_threads: int = key(
        4, "experts read at a time: in the system's queue, else by so many threads", section="pager", ge=1, le=64
    )
    io_priority: Literal["none", "idle", "low", "normal", "high"] = key(
        "none", "disk priority of all threads of the process; high needs CAP_SYS_NICE", section="pager"
    )
    cpu_affinity_mask: CoreMask | None = key(
        None, "cores that all threads of the process may use, bit i for core i: 3 or 0x3", section="engine", ge=1
    )
    router: Any = key(
        "softmax",
        "which experts a token uses: softmax, two_stage (exact), int8_lut, bit_level (approximate), "
        "module:name, an entry point, or a Router object",
        section="router",
    )
    router_top_k: int | None = key(None, "experts per token; none: the model's", section="router", ge=1)
    router_dtype: Literal["fp32", "fp16", "int8"] = key(
        "fp32", "type to which the router's weights are rounded at load", section="router"
    )
    router_quant_bits: int | None = key(
        None,
        "bits of int8_lut's and two_stage's codes; none: 8, and 12 from 65 experts up",
        section="router",
        unit="bits",
        ge=8,
        le=16,
    )
    router_audit: bool = key(False, "count selections that differ from the exact router's", section="router")
    attention: Literal["exact", "expert_local"] = key(
        "exact",
        "exact: a query sees all past tokens; expert_local: those of its experts, the newest and the first, "
        "an approximation",
        section="kv",
    )
    kv_cache_dtype: Literal["fp16", "fp32"] = key("fp16", "type of stored keys and values", section="kv")
    kv_cache_slot_size: int = key(256, "tokens per slot", section="kv", unit="tokens", ge=1, le=65536)
    kv_cache_max_slots: int = key(2048, "slots in the pool", section="kv", unit="slots", ge=1, le=2**20)
    kv_cache_persistence_path: FilePath | None = key(None, "folder of full slots and prefixes; none: off", section="kv")
    kv_cache_quota_bytes: Size | None = key(
        None, "most that the files in that folder take, oldest out; none: no limit", section="kv", unit="bytes", ge=0
    )
    dispatch_ring_size: int | None = key(
        None, "rows of a ring (async); none: as the step needs", section="dispatch", unit="rows", ge=1, le=65536
    )
    dispatch_watermark: float | None = key(
        None, "fill at which the other ring is filled (async); none: 0.75", section="dispatch", gt=0, le=1
    )
    expert_placement: Any = key(
        None,
        'where experts are computed: gpu, cpu, auto (by heat), or a mapping of "LAYER" or "LAYER.EXPERT", with * and '
        "?, to these, of which the last that matches counts; none: where the backend computes",
        section="placement",
    )
    gpu_cache_bytes: Size | None = key(
        None,
        "GPU memory for expert pages; none: what the card has left, at most all experts",
        section="placement",
        unit="bytes",
        ge=0,
    )
    cuda_graphs: Switch = key(
        "auto",
        "decode steps as CUDA graphs, which need all experts on the GPU; auto: where that can be, on: or an error that "
        "says why not",
        section="placement",
    )
    gpu_reset_on_exit: bool = key(
        False,
        "at the end free the process's pools and context on the card too, whoever in this process made them; never "
        "resets the card",
        section="placement",
    )
    telemetry: bool = key(True, "record events for boards and traces", section="telemetry")
    telemetry_top_logprobs: int = key(
        0, "most probable tokens recorded beside each sampled one", section="telemetry", live=True, ge=0, le=20
    )
    pace: float | None = key(
        None,
        "most tokens per second and sequence, to slow it for the eye; none: off",
        section="engine",
        unit="tokens/s",
        live=True,
        gt=0,
        le=1e6,
    )

    @classmethod
    def make(cls, values: Mapping[Any, Any], source: str = "settings") -> Config:
        """Checked settings from a mapping. ConfigError names `source` and the key."""
        for name in values:
            if name not in cls.model_fields:
                raise ConfigError(f"{source}: {unknown(name)}")
        try:
            config = cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(f"{source}: {in_words(error)}") from None
        config._refuse_objects(source)
        refuse_combinations(config, source)
        return config

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> Config:
        """Settings of a YAML file, then overrides. Relative paths in the file start at the file's folder."""
        from .yamlfile import read_mapping  # a parser that most starts do without

        file = Path(path).expanduser()
        values = read_mapping(file)
        for name in ("model_path", "tokenizer_path", "kv_cache_persistence_path"):
            if isinstance(values.get(name), str) and values[name]:
                values[name] = str(file.parent / Path(values[name]).expanduser())
        config = cls.make(values, str(file))
        return config.replace(**overrides) if overrides else config

    def replace(self, **overrides: Any) -> Config:
        """A copy with some keys changed, checked like any other."""
        kept = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).make(kept | overrides)

    @classmethod
    def live_keys(cls) -> tuple[str, ...]:
        """The keys that a running engine takes at a token boundary."""
        return tuple(name for name in cls.model_fields if cls.fact(name, "live"))

    @classmethod
    def fact(cls, name: str, what: str) -> Any:
        extra = cls.model_fields[name].json_schema_extra
        return extra.get(what) if isinstance(extra, dict) else None

    def _refuse_objects(self, source: str) -> None:
        for name, names, methods in OBJECTS:
            value = getattr(self, name)
            if name == "router" and isinstance(value, str) and plugins.known(value, plugins.ROUTERS):
                continue
            if name == "prefetcher" and (value is None or several(value)):
                continue
            able = not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in methods)
            if value not in names if isinstance(value, str) else not able:
                options, needed = ", ".join(names), ", ".join(f"{method}()" for method in methods)
                raise ConfigError(
                    f"{source}: {name}: {reprlib.repr(value)} is neither {options} nor an object with {needed}"
                )

    def _repr_html_(self) -> str:
        return settings_table(self)


def several(prefetcher: object) -> bool:
    """Whether it names prefetchers that work together, each once: "next_gate+history"."""
    names = prefetcher.split("+") if isinstance(prefetcher, str) else []
    return len(names) > 1 and len(set(names)) == len(names) and set(names) <= {*PREFETCH} - {"none"}


def unknown(name: object) -> str:
    """What to say of a key that does not exist."""
    near = difflib.get_close_matches(str(name), Config.model_fields, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown key {reprlib.repr(name)}{hint}"
