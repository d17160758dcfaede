"""How many experts a budget finds in memory: a cache replayed on a trace, after it has learned."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.accesses import Accesses
from ..analysis.routes import zipf_markov_routes
from ..analysis.simulate import Cache
from ..dispatch.waves import Dispatcher
from ..pager.policies import make_policy

LAYERS = 4  # of a model that are replayed at most: they are alike
TOKENS = 1600  # some fifty topics: with a few, the hit rate is that of those that came along
ASSUMED = "Zipf 1.2 within each of 6 topics of 33 tokens"


def assumed(layers: int, experts: int, top_k: int, seed: int = 1) -> Accesses:
    """A trace of one sequence for a model whose routing is not known: see ASSUMED."""
    layers = min(layers, LAYERS)
    routes = zipf_markov_routes(layers, experts, top_k, TOKENS, seed=seed)
    steps = [[(layer, [routes[layer, token].tolist()]) for layer in range(layers)] for token in range(TOKENS)]
    return Accesses(experts, top_k, steps)


def hit_rate(trace: Accesses, share: float, policy: str = "lfru") -> float:
    """0 to 1, over the second half of a trace, in a cache that holds `share` (0 to 1) of the experts."""
    layers = len({layer for step in trace.steps for layer, _ in step})
    capacity = min(layers * trace.experts, max(trace.top_k, round(share * layers * trace.experts)))
    if capacity == layers * trace.experts:
        return 1.0
    cache = Cache(trace.experts, trace.top_k, capacity, make_policy(policy, trace.experts, trace.top_k))
    half = len(trace.steps) // 2
    _replay(cache, trace, trace.steps[:half])
    before = cache.counts
    _replay(cache, trace, trace.steps[half:])
    hits, faults = cache.hits - before.hits, cache.faults - before.faults
    return hits / max(1, hits + faults)


def _replay(cache: Cache, trace: Accesses, steps: Sequence[Sequence[tuple[int, list[list[int]]]]]) -> None:
    split = Dispatcher(trace.experts, trace.top_k).split
    for step in steps:
        cache.step([(layer, rows, split(rows, trace.experts)[0][2]) for layer, rows in step], True)
