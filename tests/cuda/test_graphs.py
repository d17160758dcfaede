"""Decode steps at one go, captured as graphs: the bits of the steps layer by layer, and nothing else inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.cuda_experts import Sharing, most_jobs
from colibri_lab.ops.device import Device
from colibri_lab.ops.driver_cupy import CupyDriver
from colibri_lab.ops.launch import Kernels
from colibri_lab.ops.products import batch_for, job_list, upload
from colibri_lab.ops.routing import KINDS
from colibri_lab.ops.simulator import SimDevice, SimulatedFault
from colibri_lab.ops.types import ON_CPU, NonFiniteLogits
from tests.ops.models import Shape

from .card import Card, CUDARuntimeError, plug_in
from .card_streams import Stream
from .whole import WholeBound, compare, pair

TEXTS = [[(0, 3), (0, 9), (1, 4)], [(2, 7), (2, 8)]]
STEPS = [[(0, 5)], [(1, 6)], [(0, 1), (2, 2)], [(2, 3), (0, 4), (1, 5)], [(1, 7)], [(1, 8), (0, 9)], [(0, 2)]]
SHAPES = {
    "plain": Shape(layers=3),
    "dense": Shape(layers=3, dense=(1,), shared=9, window=3, bias=True),
    "last dense": Shape(dense=(1,), dtype="int8", qk_norm="flat", tied=True, kv_dtype="fp32"),
    "shared": Shape(shared=20, shared_gate=False, dtype="fp16", group=0, normalise=False, qk_norm="head"),
    "one expert": Shape(experts=5, top_k=1, dtype="fp32", group=0),
    "all experts": Shape(experts=3, top_k=3),
}


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_the_steps_layer_by_layer(name: str, precision: str) -> None:
    whole, layers = pair(SHAPES[name], SimDevice("random", 3), SimDevice(), precision)
    compare(whole, layers, STEPS, TEXTS)
    graphs = whole.backend.whole.graphs
    assert (graphs.captured, graphs.recaptured, graphs.replays) == (3, 0, len(STEPS) - 3)  # sizes 1, 2, 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_router(kind: str) -> None:
    shape = Shape(hidden=72, experts=40, top_k=3, dtype="fp32", group=0, kv_dtype="fp32")
    compare(*pair(shape, SimDevice("backward"), SimDevice(), kind=kind), STEPS, TEXTS)


def test_a_longer_history_is_another_graph() -> None:
    """Blocks that share a row's tokens are part of the launch, in powers of two; lengths are not."""
    shape = Shape(layers=2, positions=600, capacity=255, seats=2, ffn=4, experts=2, heads=1, kv_heads=1, hidden=16,
                  vocab=20, dtype="fp32", group=0, kv_dtype="fp32")  # fmt: skip
    whole, layers = pair(shape, SimDevice(), SimDevice())
    steps = [[(0, t % 20)] for t in range(4)]
    compare(whole, layers, steps, [[(0, t % 20) for t in range(254)]])
    graphs = whole.backend.whole.graphs
    assert (graphs.captured, graphs.replays) == (2, 2)


def test_a_card_holds_nothing_but_launches_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card refuses all else inside a capture, and is late with everything outside."""
    card = plug_in(monkeypatch, Card())
    whole, layers = pair(SHAPES["dense"], Device(CupyDriver()), SimDevice())
    taken = card.mallocs
    compare(whole, layers, STEPS, TEXTS)
    assert card.mallocs == taken, "nothing is taken in a step"
    names = [e[0] for e in card.log]
    assert names.count("capture") == names.count("captured") == 3 and names.count("replay") == len(STEPS) - 3
    assert names.index("captured") < names.index("replay")
    inside = names[names.index("capture") + 1 : names.index("captured")]
    assert set(inside) == {"launch"}
    whole.backend.close()
    assert card.clean


def test_a_replay_reads_nothing_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to the device before, one back after, and the logits; places of keys are written once they are known."""
    card = plug_in(monkeypatch, Card())
    whole, _ = pair(SHAPES["plain"], Device(CupyDriver()), SimDevice())
    whole.step(TEXTS[0])
    whole.bring()
    whole.step_whole([(0, 5)])
    card.log.clear()
    whole.step_whole([(0, 6)])
    copies = [e[0] for e in card.log if e[0] in ("send", "fetch", "replay", "launch")]
    assert copies == ["send", "replay", "fetch", *["send"] * 4, "launch", "fetch"]
    whole.backend.close()


def test_what_a_graph_holds_is_captured_anew_when_it_changes() -> None:
    """A page table at another place, another audit: the old graph goes."""
    whole, layers = pair(SHAPES["plain"], SimDevice(), SimDevice())
    compare(whole, layers, [[(0, 5)], [(0, 6)]], TEXTS)
    backend, graphs = whole.backend, whole.backend.whole.graphs
    frames = backend.experts.frames
    old, frames.table = frames.table, upload(backend.device, frames.table)
    old[:] = 0
    compare(whole, layers, [[(0, 7)], [(0, 8)]], [])
    assert (graphs.captured, graphs.recaptured, graphs.replays) == (2, 1, 2)
    for one in (whole, layers):
        one.backend.router.routing = replace(one.backend.router.routing, audit=False)
    compare(whole, layers, [[(0, 7)], [(0, 8)]], [])
    assert (graphs.captured, graphs.recaptured, graphs.replays) == (3, 2, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_logits_that_are_not_finite_name_their_row(size: int) -> None:
    whole, layers = pair(SHAPES["plain"], SimDevice(), SimDevice())
    step = [(seat, 5 + seat) for seat in range(size)]
    compare(whole, layers, [step], TEXTS)
    gate = whole.backend.router._gates[1]
    kept = gate.copy()
    gate[0, :] = np.nan
    with pytest.raises(NonFiniteLogits) as raised:
        whole.step_whole(step)
    assert (raised.value.layer, raised.value.row) == (1, 0)
    gate[:] = kept
    whole.next = list(layers.next)
    compare(whole, layers, [step], [])


def test_a_table_that_is_wrong() -> None:
    whole, _ = pair(SHAPES["plain"], SimDevice(), SimDevice())
    whole.step(TEXTS[0])
    whole.bring()
    whole.backend.attention.where[0, 1, 0] = 10**6
    with pytest.raises(IndexError, match="where"):
        whole.step_whole([(0, 5)])


@pytest.mark.parametrize("shared", [
    (Sharing(2 << 16), r"gpu_cache_bytes has room for 2 of the 12 experts"),
    (Sharing(None, np.full((3, 4), ON_CPU, np.int8)), "expert_placement leaves experts to the processor"),
])  # fmt: skip
def test_what_speaks_against_graphs(shared: tuple[Sharing, str]) -> None:
    sharing, why = shared
    backend = CudaBackend(SimDevice(), "exact", sharing)
    WholeBound(backend, SHAPES["plain"])
    assert backend.graphless() == why.replace("\\", "")
    for shape, graphs, said in (
        (replace(SHAPES["plain"], recent=2, sinks=1), True, "attention: expert_local is not captured"),
        (SHAPES["plain"], False, "they are off"),
        (SHAPES["plain"], True, ""),
    ):
        backend = CudaBackend(SimDevice(), "exact", graphs=graphs)
        WholeBound(backend, shape)
        assert backend.graphless() == said


INSIDE: dict[str, Callable[[Device, Any], object]] = {
    "taken": lambda d, a: d.empty((4,), np.float32),
    "copied": lambda d, a: d.write(a, np.zeros(4, np.float32)),
    "copied back": lambda d, a: d.read(a),
    "waited for": lambda d, a: d.settle(),
    "an event": lambda d, a: d.used(),
    "an order": lambda d, a: d.after_used(None),
    "another capture": lambda d, a: d.captured(lambda: None),
    "loaded": lambda d, a: Kernels(d)("add_sum", (1, 1, 1), 256, a, a, 4),
}


@pytest.mark.parametrize("where", ["sim", "card"])
@pytest.mark.parametrize("name", INSIDE)
def test_a_capture_holds_launches_alone(monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    card = plug_in(monkeypatch, Card())
    device = SimDevice() if where == "sim" else Device(CupyDriver())
    array = upload(device, np.zeros(4, np.float32))
    with pytest.raises(SimulatedFault if where == "sim" else (AssertionError, AttributeError), match=r"."):
        device.captured(lambda: INSIDE[name](device, array))
    device.close()
    assert card.clean


def test_a_graph_is_done_when_it_is_replayed_alone() -> None:
    """Capturing does nothing; a replay reads what lies in the arrays then, and numbers as they were."""
    device = SimDevice()
    kernels, x, more = Kernels(device), upload(device, np.zeros(4, np.float32)), upload(device, np.ones(4, np.float32))

    def work() -> None:
        kernels("add_sum", (1, 1, 1), 256, x, more, 4)

    work()
    graph = device.captured(work)
    assert x.tolist() == [1] * 4
    more[:] = 5
    device.replay(graph)
    assert x.tolist() == [6] * 4
    device.close()
    with pytest.raises(KeyError):
        device.replay(graph)


def test_a_capture_that_fails_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card())
    whole, layers = pair(SHAPES["plain"], Device(CupyDriver()), SimDevice())
    compare(whole, layers, [], TEXTS)
    plain = Stream.launch

    def fails(self: Stream, *one: Any) -> None:
        if self.captured is not None and one[1] == "swiglu":
            raise CUDARuntimeError(900, "cudaErrorStreamCaptureUnsupported: operation not permitted")
        plain(self, *one)

    monkeypatch.setattr(Stream, "launch", fails)
    with pytest.raises(CUDARuntimeError, match="not permitted") as raised:
        whole.step_whole([(0, 5)])
    assert any("cuda_graphs: off" in note for note in raised.value.__notes__)
    del raised  # its traceback holds a stream
    monkeypatch.setattr(Stream, "launch", plain)
    whole.next[0] -= 1
    compare(whole, layers, STEPS, [])
    whole.backend.close()
    assert card.clean


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("experts", [3, 40])
def test_picks_are_planned_as_the_host_plans_them(rows: int, experts: int) -> None:
    rng, k = np.random.default_rng(rows * experts), 3
    for live in {1, rows // 2 or 1, rows}:
        chosen = np.array([rng.permutation(experts)[:k] for _ in range(rows)], np.int32)
        weights = rng.random((rows, k)).astype(np.float32)
        batch, most = batch_for([rows]), most_jobs(rows, k, experts)
        device = SimDevice("random", rows)
        jobs, of, order = (device.empty(shape, np.int32) for shape in ((most, 4), (rows * k,), (rows * k,)))
        weight, begin = device.empty((rows * k,), np.float32), device.empty((rows + 1,), np.int32)
        Kernels(device)("plan_picks", (1, 1, 1), 256, upload(device, chosen), upload(device, weights),
                        upload(device, np.array([live], np.int32)), jobs, of, order, weight, begin, rows, k, experts, 2,
                        batch, most, shared=8 * rows * k)  # fmt: skip
        expert, row = chosen[:live].reshape(-1), np.repeat(np.arange(live), k)
        sort = np.lexsort((row, expert))
        wanted, counts = np.unique(expert, return_counts=True)
        want = job_list([2 * experts + int(e) for e in wanted], counts.tolist(), batch)
        assert np.array_equal(jobs[: len(want)], want) and not jobs[len(want) :].any()
        assert np.array_equal(of[: live * k], row[sort])
        want_order = np.lexsort((expert[sort], row[sort]))
        assert np.array_equal(order[: live * k], want_order)
        assert np.array_equal(weight[: live * k], weights[:live].reshape(-1)[sort][want_order])
        assert begin.tolist() == [min(r, live) * k for r in range(rows + 1)]
