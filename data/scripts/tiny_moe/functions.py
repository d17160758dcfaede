"""Differentiable pieces of the training model, with backward passes written by hand.

Matrix products run in bfloat16 over fp32 master weights; what is element-wise runs in float32 inside one compiled
function each. That, and preallocated outputs, is what makes the training fit two processor cores.

Shape legend: B windows, L tokens of a window, N = B * L rows, H hidden, F expert width, E experts, n heads, k kv heads,
D head_dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

BF16 = torch.bfloat16
QUERY_BLOCK = 256  # attention works in blocks of queries; keys past the block are never touched
EPS = 1e-5

torch._dynamo.config.recompile_limit = 64


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile unless TINY_MOE_EAGER is set (for a quick try)."""
    return function if os.environ.get("TINY_MOE_EAGER") else torch.compile(function, dynamic=False)


@compiled
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [.., H] -> bfloat16"""
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(BF16)


@compiled
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on halves: [B, L, n, D] -> [B, n, L, D]"""
    x = x.float()
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos[None, :, None] + turned * sin[None, :, None]).to(BF16).transpose(1, 2).contiguous()


@compiled
def masked_softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax(scores.float() * scale + mask, -1).to(BF16)


@compiled
def softmax_backward(p: Tensor, dp: Tensor, scale: float) -> Tensor:
    p, dp = p.float(), dp.float()
    return (p * (dp - (p * dp).sum(-1, keepdim=True)) * scale).to(BF16)


@compiled
def swiglu(h: Tensor) -> Tensor:
    """[N, 2F] -> [N, F]"""
    gate, up = h.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(BF16)


@compiled
def swiglu_backward(h: Tensor, da: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    da = da.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return torch.cat([da * up * (sigmoid + silu * (1 - sigmoid)), da * silu], -1).to(BF16)


@compiled
def scale_rows(out: Tensor, weight: Tensor) -> Tensor:
    return (out.float() * weight[:, None]).to(BF16)


@compiled
def scale_rows_backward(dy: Tensor, out: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dy = dy.float()
    return (dy * out.float()).sum(1), (dy * weight[:, None]).to(BF16)


@compiled
def loss_and_gradient(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and d loss / d logits."""
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    e = (logits - top).exp()
    z = e.sum(-1, keepdim=True)
    loss = (z.log() + top).squeeze(-1) - logits.gather(1, target[:, None]).squeeze(1)
    hit = (torch.arange(logits.shape[1])[None] == target[:, None]).float()
    return loss.sum(), (e / z - hit).to(BF16)


class Linear(Function):
    """x @ w.T with the weight rounded to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rounded = weight.to(BF16)
        ctx.save_for_backward(x, rounded)
        return x @ rounded.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, rounded = ctx.saved_tensors
        dy = dy.contiguous()
        return dy @ rounded, (dy.t() @ x).float()


def causal_masks(length: int) -> list[Tensor]:
    """One mask for each block of queries: [block, keys up to its end], 0 or -inf."""
    full = torch.full((length, length), float("-inf")).triu(1)
    return [full[at : at + QUERY_BLOCK, : at + QUERY_BLOCK].contiguous() for at in range(0, length, QUERY_BLOCK)]


class Attention(Function):
    """Causal attention with grouped keys: q [B, n, L, D], k and v [B, k, L, D] -> [B, n, L, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor]) -> Tensor:
        windows, heads, length, width = q.shape
        shared, scale = heads // k.shape[1], width**-0.5
        out, kept = torch.empty_like(q), []
        for b in range(windows):
            keys, values = k[b].repeat_interleave(shared, 0), v[b].repeat_interleave(shared, 0)
            for block, mask in enumerate(masks):
                first, end = block * QUERY_BLOCK, min(length, (block + 1) * QUERY_BLOCK)
                p = masked_softmax(torch.bmm(q[b, :, first:end], keys[:, :end].transpose(1, 2)), mask, scale)
                out[b, :, first:end] = torch.bmm(p, values[:, :end])
                kept.append(p)
        ctx.save_for_backward(q, k, v)
        ctx.probabilities, ctx.blocks = kept, len(masks)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        windows, heads, length, width = q.shape
        kv_heads = k.shape[1]
        shared, scale = heads // kv_heads, width**-0.5
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dout = dout.contiguous()
        for b in range(windows):
            keys, values = k[b].repeat_interleave(shared, 0), v[b].repeat_interleave(shared, 0)
            dkeys, dvalues = torch.zeros(heads, length, width), torch.zeros(heads, length, width)
            for block in range(ctx.blocks):
                first, end = block * QUERY_BLOCK, min(length, (block + 1) * QUERY_BLOCK)
                p, d = ctx.probabilities[b * ctx.blocks + block], dout[b, :, first:end]
                dvalues[:, :end] += torch.bmm(p.transpose(1, 2), d)
                ds = softmax_backward(p, torch.bmm(d, values[:, :end].transpose(1, 2)), scale)
                dq[b, :, first:end] = torch.bmm(ds, keys[:, :end])
                dkeys[:, :end] += torch.bmm(ds.transpose(1, 2), q[b, :, first:end])
            dk[b] = dkeys.view(kv_heads, shared, length, width).sum(1)
            dv[b] = dvalues.view(kv_heads, shared, length, width).sum(1)
        ctx.probabilities = None
        return dq, dk, dv, None


class Experts(Function):
    """SwiGLU experts: rows [N, H] sorted by expert, weight [N], w13 [E, 2F, H], w2 [E, H, F], counts of rows [E]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, counts: list[int]) -> Tensor:
        w13, w2 = w13.to(BF16), w2.to(BF16)
        h = rows.new_empty(rows.shape[0], w13.shape[1])
        out = torch.empty_like(rows)
        used = _each(counts, lambda e, s: torch.mm(rows[s], w13[e].t(), out=h[s]))
        h[used:] = 0
        a = swiglu(h)
        _each(counts, lambda e, s: torch.mm(a[s], w2[e].t(), out=out[s]))
        out[used:] = 0
        ctx.save_for_backward(rows, weight, w13, w2, h, a, out)
        ctx.counts = counts
        return scale_rows(out, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        rows, weight, w13, w2, h, a, out = ctx.saved_tensors
        dweight, dout = scale_rows_backward(dy, out, weight)
        drows, da = torch.empty_like(rows), torch.empty_like(a)
        dw13, dw2 = torch.zeros(w13.shape), torch.zeros(w2.shape)

        def second(e: int, s: slice) -> None:
            dw2[e] = dout[s].t() @ a[s]
            torch.mm(dout[s], w2[e], out=da[s])

        used = _each(ctx.counts, second)
        da[used:] = 0
        dh = swiglu_backward(h, da)

        def first(e: int, s: slice) -> None:
            dw13[e] = dh[s].t() @ rows[s]
            torch.mm(dh[s], w13[e], out=drows[s])

        _each(ctx.counts, first)
        drows[used:] = 0
        return drows, dweight, dw13, dw2, None


def _each(counts: list[int], call: Callable[[int, slice], Any]) -> int:
    """Call with (expert, its rows) for every expert that has rows; the number of rows."""
    at = 0
    for expert, count in enumerate(counts):
        if count:
            call(expert, slice(at, at + count))
        at += count
    return at


class TiedLoss(Function):
    """Mean cross-entropy through the tied head in chunks of rows; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, embedding: Tensor, target: Tensor, chunk: int) -> Tensor:
        rounded = embedding.to(BF16)
        dh, dw, loss = torch.empty_like(h), torch.zeros(embedding.shape), torch.zeros(())
        for at in range(0, len(h), chunk):
            part = slice(at, at + chunk)
            summed, gradient = loss_and_gradient(h[part] @ rounded.t(), target[part])
            loss += summed
            torch.mm(gradient, rounded, out=dh[part])
            dw += (gradient.t() @ h[part]).float()
        ctx.save_for_backward(dh, dw)
        ctx.rows = len(h)
        return loss / len(h)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dh, dw = ctx.saved_tensors
        return (dh.float() * (d / ctx.rows)).to(BF16), dw * (d / ctx.rows), None, None
