"""From the settings to a router: the foreign object if there is one, and the weights with what the router asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import plugins
from ..config import ROUTERS, Config
from ..errors import ConfigError
from ..ops.routing import MOST_EXPERTS, Routing, as_dtype, default_bits
from ..ops.types import ModelWeights


def settle_router(config: Config) -> Any:
    """The foreign router, by instance, module:name or entry point; None for those of this library."""
    if isinstance(config.router, str):
        return None if config.router in ROUTERS else plugins.load(config.router, plugins.ROUTERS, "select", "router")
    return config.router


def settle_weights(weights: ModelWeights, config: Config) -> tuple[ModelWeights, int]:
    """Weights with `routing`, router_top_k and router_dtype applied, and how many router weights the last changed."""
    top_k = config.router_top_k or weights.top_k
    if top_k > weights.experts and config.router_top_k is not None:
        raise ConfigError(
            f"settings: router_top_k: a layer has {weights.experts} experts, so k is at most that, not {top_k}"
        )
    if weights.experts > MOST_EXPERTS:
        raise ConfigError(
            f"settings: model_path: {weights.experts} experts a layer; routers take {MOST_EXPERTS} at most"
        )
    foreign = not isinstance(config.router, str) or config.router not in ROUTERS
    routing = Routing.make(
        len(weights.layers),
        "softmax" if foreign else config.router,
        config.router_quant_bits or default_bits(weights.experts),
        config.router_audit and not foreign,
    )
    layers, rounded = [], 0
    for layer in weights.layers:
        if layer.gate is not None and config.router_dtype != "fp32":
            gate = as_dtype(layer.gate, config.router_dtype)
            rounded += int((gate != layer.gate).sum())
            layer = replace(layer, gate=gate)
        layers.append(layer)
    return replace(weights, routing=routing, top_k=top_k, layers=tuple(layers)), rounded
