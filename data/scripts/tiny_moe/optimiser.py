"""Muon: momentum whose update is made orthogonal by Newton-Schulz steps (Keller Jordan, 2024), for matrices only.

Each process orthogonalises the matrices of every world-th layer; updates are exchanged in bfloat16.
"""

from __future__ import annotations

import torch
from functions import BF16
from model import Config, LanguageModel
from torch import Tensor, nn
from torch import distributed as dist

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def is_matrix(name: str) -> bool:
    """Attention and expert matrices go to Muon; embedding, norms and routers to AdamW."""
    return name.endswith((".qkv", ".o", ".w13", ".w2"))


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """About the nearest matrix with all singular values 1, for g [.., N, K]; scaled for tall matrices."""
    x = g.to(BF16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    x = x.mT if tall else x
    return x * max(1.0, g.shape[-2] / g.shape[-1]) ** 0.5


class Muon:
    def __init__(self, model: LanguageModel, config: Config, rank: int, world: int) -> None:
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.parts = {"qkv": [query, key, key], "w13": [config.ffn, config.ffn]}  # stacked matrices, each apart
        self.rank, self.world = rank, world
        layers = [[(n, p) for n, p in block.named_parameters() if is_matrix("." + n)] for block in model.blocks]
        self.owned: list[list[tuple[str, nn.Parameter]]] = [
            [pair for i, layer in enumerate(layers) if i % world == r for pair in layer] for r in range(world)
        ]
        self.momentum = [torch.zeros_like(p) for _, p in self.owned[rank]]

    def update(self, name: str, u: Tensor) -> Tensor:
        sizes = self.parts.get(name.rsplit(".", 1)[-1])
        if sizes is None:
            return orthogonal(u)
        return torch.cat([orthogonal(part) for part in u.split(sizes, dim=-2)], dim=-2)

    @torch.no_grad()
    def step(self, rate: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        mine = []
        for (name, parameter), kept in zip(self.owned[self.rank], self.momentum, strict=True):
            assert parameter.grad is not None
            kept.lerp_(parameter.grad, 1 - momentum)
            mine.append(self.update(name, parameter.grad.lerp(kept, momentum)).to(BF16).reshape(-1))
        everyone = [torch.empty(sum(p.numel() for _, p in owned), dtype=BF16) for owned in self.owned]
        dist.all_gather([t.view(torch.uint8) for t in everyone], torch.cat(mine).view(torch.uint8))
        for owned, flat in zip(self.owned, everyone, strict=True):
            sizes = [p.numel() for _, p in owned]
            for (_, parameter), update in zip(owned, flat.split(sizes), strict=True):
                parameter.mul_(1 - rate * decay).add_(update.view_as(parameter).float(), alpha=-rate)


class Exchange:
    """Averages gradients over the processes, sent as bfloat16, together with the first process's clock."""

    def __init__(self, parameters: list[nn.Parameter], world: int) -> None:
        self.parameters, self.world = parameters, world
        count = sum(p.numel() for p in parameters)
        self.sent = torch.empty(count, dtype=BF16)
        self.received = [torch.empty(count, dtype=BF16) for _ in range(world)]
        self.mean = torch.empty(count)

    @torch.no_grad()
    def average(self, clock: float) -> float:
        sizes = [p.numel() for p in self.parameters]
        for part, parameter in zip(self.sent.split(sizes), self.parameters, strict=True):
            assert parameter.grad is not None
            part.copy_(parameter.grad.reshape(-1))
        shared = torch.tensor([clock])
        dist.broadcast(shared, 0)
        dist.all_gather([t.view(torch.uint8) for t in self.received], self.sent.view(torch.uint8))
        self.mean.copy_(self.received[0])
        for other in self.received[1:]:
            self.mean.add_(other)
        self.mean.div_(self.world)
        for part, parameter in zip(self.mean.split(sizes), self.parameters, strict=True):
            parameter.grad = part.view_as(parameter)
        return float(shared.item())
