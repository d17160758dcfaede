"""Routes that come and go like topics, for models whose own routing is not known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def zipf_markov_routes(layers: int, experts: int, top_k: int, tokens: int, rows: int = 1, seed: int = 0,
                       topics: int = 6, stay: float = 0.97, exponent: float = 1.2) -> NDArray[np.int64]:  # fmt: skip
    """Routes int64 [L, tokens * rows, k] of `rows` sequences that advance together, each with topics of its own.

    Each topic has its own order of a layer's experts, of which the r-th has the weight r**-exponent; a topic lasts
    1 / (1 - stay) tokens on average. The same seed gives the same routes.
    """
    weights = -exponent * np.log(np.arange(1, experts + 1))  # logarithms, by rank
    topic = np.zeros((tokens, rows), np.int64)
    for row in range(rows):
        chain = np.random.default_rng([seed, row] if row else seed)
        now = 0
        for token in range(tokens):
            if chain.random() > stay:
                now = int(chain.integers(topics))
            topic[token, row] = now
    routes = np.empty((layers, tokens * rows, top_k), np.int64)
    for layer in range(layers):
        orders = np.array([np.random.default_rng([seed, layer, t]).permutation(experts) for t in range(topics)])
        noise = np.random.default_rng([seed, layer, 1]).gumbel(size=(tokens * rows, experts))
        ranks = np.argsort(-(weights + noise), axis=1, kind="stable")[:, :top_k]  # without replacement, by weight
        routes[layer] = np.take_along_axis(orders[topic.ravel()], ranks, axis=1)
    return routes
