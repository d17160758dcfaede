"""An expert's network gives the same bits on the device and on the processor, in every format and precision."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.ops.launch import Kernels
from colibri_lab.ops.products import upload
from colibri_lab.ops.simulator import SimDevice
from tests.ops.models import FORMATS, Bound, Shape, cpu, make, with_format

from .test_backend import sim

WIDE = Shape(hidden=1090, ffn=75, experts=3, top_k=2, layers=1, shared=0, capacity=8)  # two turns of a block, odd ends


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("dtype", "group"), FORMATS)
def test_experts(dtype: str, group: int, precision: str) -> None:
    """x after the experts minus x before: the sum of experts, from the same normed inputs and weights of rows."""
    for shape in (with_format(WIDE, dtype, group), with_format(Shape(layers=1, hidden=100, ffn=140), dtype, group)):
        model = make(shape, 5, poison=0xFF)
        a, b = Bound(sim(precision), shape, model=model), Bound(cpu(precision=precision), shape, model=model)
        rng = np.random.default_rng(6)
        for n in (1, 6):
            for one in (a, b):
                one.backend.embed(n)
                one.rows.seat[:n], one.rows.position[:n] = 0, np.arange(n)
                one.backend.attn_router(0, n)
                one.rows.kv_dst[:n] = np.arange(n)
            experts = np.argsort(rng.random((n, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
            weights, x = rng.random((n, shape.top_k), np.float32), rng.standard_normal((n, shape.hidden), np.float32)
            normed = rng.standard_normal((n, shape.hidden), np.float32)
            for one in (a, b):
                one.rows.experts[:n], one.rows.weights[:n] = experts, weights
                one.rows.x[:n], one.rows.ffn_in[:n] = x, normed
            a.backend.device.write(a.backend._x[:n], x)
            a.backend.device.write(a.backend._ffn_in[:n], normed)
            for one in (a, b):
                one.backend.expert_ffn(0, n, 0, shape.experts)
            assert np.array_equal(a.rows.x[:n], b.rows.x[:n])


def test_exp_of_all_sizes() -> None:
    """silu(gate) * up over the whole range of exp, zeros of both signs too."""
    rng = np.random.default_rng(1)
    gate = np.concatenate([rng.uniform(-88, 88, 3000), rng.uniform(-1, 1, 1000), [0.0, -0.0, 88.3, -88.3]])
    gate = gate.astype(np.float32)[None]
    device, n = SimDevice(), gate.shape[1]
    out = device.empty(gate.shape, np.float32)
    up = np.ones_like(gate)
    Kernels(device)("swiglu", (-(-n // 256), 1, 1), 256, upload(device, gate), upload(device, up), out, n)
    want = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    assert np.allclose(out, want, rtol=1e-6, atol=1e-30)
