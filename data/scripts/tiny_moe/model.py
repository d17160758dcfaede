"""The training model: Mixtral's architecture over the pieces of functions.py.

Shape legend as there; T = N * top_k routed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from functions import BF16, Attention, Experts, Linear, TiedLoss, causal_masks, rms_norm, rotate
from torch import Tensor, nn
from torch.nn import functional

ROWS_MULTIPLE = 32  # each expert's rows are padded to it: few distinct matrix shapes, which the library then caches


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults are the embedded model's."""

    vocab: int = 3072
    hidden: int = 256
    ffn: int = 64
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 16
    top_k: int = 2
    context: int = 1024
    theta: float = 10000.0


def normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class AttentionLayer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.qkv = normal((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden, std=0.02)
        self.o = normal(c.hidden, c.heads * c.head_dim, std=0.02 / (2 * c.layers) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masks: list[Tensor]) -> Tensor:
        windows, length, hidden = x.shape
        qkv = Linear.apply(x.view(-1, hidden), self.qkv).view(windows, length, -1, self.head_dim)
        queries_keys = rotate(qkv[:, :, : self.heads + self.kv_heads], cos, sin)
        values = qkv[:, :, self.heads + self.kv_heads :].transpose(1, 2).contiguous()
        mixed = Attention.apply(queries_keys[:, : self.heads], queries_keys[:, self.heads :], values, masks)
        flat = mixed.transpose(1, 2).reshape(windows * length, -1)
        return Linear.apply(flat, self.o).view(windows, length, -1)


class MoELayer(nn.Module):
    """Router and experts; forward leaves the step's figures in `balance`, `z_loss`, `load` [E] and `chosen` [N, k]."""

    balance: Tensor
    z_loss: Tensor
    load: Tensor
    chosen: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.experts, self.top_k = c.experts, c.top_k
        self.gate = normal(c.experts, c.hidden, std=0.02)
        self.w13 = normal(c.experts, 2 * c.ffn, c.hidden, std=0.02)
        self.w2 = normal(c.experts, c.hidden, c.ffn, std=0.02 / (2 * c.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])  # [N, H]
        logits = functional.linear(rows.float(), self.gate)  # [N, E]
        p = logits.softmax(-1)
        self.chosen = logits.detach().topk(self.top_k, -1).indices
        weight = p.gather(1, self.chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        counts = torch.bincount(self.chosen.flatten(), minlength=self.experts)
        self.load = counts.float() / self.chosen.numel()
        self.balance = self.experts * (self.load * p.mean(0)).sum()
        self.z_loss = (logits.logsumexp(-1) ** 2).mean()
        return self.dispatch(rows, weight, counts).view_as(x)

    def dispatch(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Sort rows by expert, pad each expert's share, run, bring back and add up."""
        flat = self.chosen.reshape(-1)  # [T]
        order = flat.argsort(stable=True)
        padded = (counts + ROWS_MULTIPLE - 1) // ROWS_MULTIPLE * ROWS_MULTIPLE
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        place = torch.arange(len(flat)) + shift[flat[order]]
        size = len(flat) + self.experts * ROWS_MULTIPLE
        source = torch.zeros(size, dtype=torch.long)
        source[place] = order
        valid = torch.zeros(size)
        valid[place] = 1.0
        gathered = rows.index_select(0, source // self.top_k)
        gate = weight.reshape(-1).index_select(0, source) * valid
        out = Experts.apply(gathered, gate, self.w13, self.w2, padded.tolist())
        back = torch.empty_like(order)
        back[order] = place
        return out.index_select(0, back).view(-1, self.top_k, rows.shape[1]).sum(1)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_norm = nn.Parameter(torch.ones(c.hidden))
        self.attention = AttentionLayer(c)
        self.post_norm = nn.Parameter(torch.ones(c.hidden))
        self.moe = MoELayer(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masks: list[Tensor]) -> Tensor:
        x = x + self.attention(rms_norm(x, self.input_norm), cos, sin, masks)
        return x + self.moe(rms_norm(x, self.post_norm))


class LanguageModel(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embedding = normal(c.vocab, c.hidden, std=0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden))
        frequency = c.theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.context).float(), frequency).repeat(1, 2)  # [P, D]
        self.cos, self.sin = angle.cos(), angle.sin()
        self.masks: dict[int, list[Tensor]] = {}

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, L] -> normed hidden states bfloat16 [N, H]"""
        length = ids.shape[1]
        if length not in self.masks:
            self.masks[length] = causal_masks(length)
        x = functional.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length], self.masks[length])
        return rms_norm(x, self.norm).view(-1, x.shape[-1])

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy, nats a token."""
        return TiedLoss.apply(self.hidden(ids), self.embedding, target.reshape(-1), 1024)

    @torch.no_grad()
    def token_losses(self, ids: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of each token, [B, L]."""
        logits = (self.hidden(ids) @ self.embedding.to(BF16).t()).float()
        return functional.cross_entropy(logits, target.reshape(-1), reduction="none").view(target.shape)
