"""Settings that are right alone and wrong together: a key that would change nothing is refused, not ignored."""

from __future__ import annotations

import reprlib
from typing import Any

from . import placement
from .errors import ConfigError


def refuse_combinations(config: Any, source: str) -> None:
    """ConfigError names `source`, the key and the way out."""
    try:
        placement.rules(config.expert_placement)
    except ConfigError as error:
        raise ConfigError(f"{source}: expert_placement: {error}") from None
    if config.router_quant_bits is not None and config.router not in ("int8_lut", "two_stage"):
        raise ConfigError(
            f"{source}: router_quant_bits: router {reprlib.repr(config.router)} has no codes to choose the bits of; "
            f"int8_lut and two_stage do"
        )
    size = config.dispatch_ring_size
    if size is not None and size & (size - 1):
        raise ConfigError(f"{source}: dispatch_ring_size: {size} is no power of two; {1 << size.bit_length()} is")
    for name in ("dispatch_ring_size", "dispatch_watermark"):
        if config.engine_mode == "sync" and getattr(config, name) is not None:
            raise ConfigError(f"{source}: {name}: engine_mode sync has no rings; set engine_mode: async")
    if size is not None and config.attention == "expert_local":
        raise ConfigError(
            f"{source}: dispatch_ring_size: attention expert_local depends on which rows share a step, "
            f"so steps are never cut into groups; leave the key out"
        )
