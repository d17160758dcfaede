"""Sections that say how fast a card is, beside what it could do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from colibri_lab.memory import free_memory
from colibri_lab.ops.cuda import SPLIT, CudaBackend
from colibri_lab.ops.cuda_experts import Sharing
from colibri_lab.ops.device import Device
from colibri_lab.ops.launch import LANE_DIMS, Kernels
from colibri_lab.ops.layout import ceil_div
from colibri_lab.ops.products import upload
from tests.cuda.whole import WholeBound
from tests.ops.models import Bound, Shape
from tests.parity.models import engine, greedy

from .machine import Launch, Machine, Tape
from .proof import PROMPT
from .rows import Rows
from .shapes import expert_bytes, fitting, quick, whole_pages

COPY, LINK = "device copy", "host link"
HISTORY = [3, 1, 2]
PART = 3 << 30  # bytes of experts where a part of the stack shows what the whole does


def ceilings(m: Machine, put: Rows) -> None:
    """What copies reach: on the device, read and written; from the host's locked memory, by size of a transfer."""
    driver, size = m.driver(), m.sizes.copied
    source, target = (driver.empty((size,), np.uint8) for _ in range(2))
    seconds = m.clock.stream(driver, lambda stream: m.clock.copy(driver, target, source, stream), m.sizes.rounds)
    put(COPY, 2 * size / seconds / 1e9, "GB/s")
    slab = whole_pages(m.sizes.slab)
    driver.lock(slab)
    try:
        rates = {size: _sent(m, driver, target, slab, size) for size in m.sizes.sent}
        for size, rate in rates.items():
            put(f"{LINK}, {size >> 10} KiB", rate, "GB/s")
        rate = _sent(m, driver, target, slab, expert_bytes(m.sizes.layer))
        put(f"{LINK}, one expert", rate, "GB/s", share=rate / max(rates.values()), least=0.85)
    finally:
        driver.unlock(slab)
        for array in (source, target):
            driver.free(array)
        driver.close(False)


def _sent(m: Machine, driver: Any, target: Any, slab: Any, size: int) -> float:
    """GB/s of transfers of `size` bytes, one behind the other."""
    count = max(1, min(len(slab), target.nbytes) // size)

    def send(stream: Any) -> None:
        for at in range(0, count * size, size):
            driver.write(target[at : at + size], slab[at : at + size], stream)

    return count * size / m.clock.stream(driver, send, max(2, m.sizes.rounds // 4)) / 1e9


class Parts:
    """A backend that tells a tape which part of a step it is in."""

    def __init__(self, backend: CudaBackend, tape: Tape) -> None:
        self._backend, self._tape = backend, tape

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name in ("embed", "attn_router", "expert_ffn", "head"):
            self._tape.part = name
        return found


@contextmanager
def taped(m: Machine, shape: Shape) -> Iterator[tuple[Tape, Bound, np.ndarray]]:
    """A tape of one step over random weights that are resident, the model at that step, and the step's logits."""
    tape = Tape(m.driver())
    device = Device(tape)
    try:
        bound = Bound(Parts(CudaBackend(device), tape), shape, model=quick(shape))
        bound.run(HISTORY)
        again(bound)
        tape.keeps = True
        scores = again(bound)
        tape.keeps = False
        yield tape, bound, scores
    finally:
        tape.forget()
        device.close()


def again(bound: Bound, at_one_go: bool = False) -> np.ndarray:
    """The same token at the same position: the same experts, whose pages are there from the second time on."""
    bound.next[0], free = len(HISTORY), list(bound.free)
    scores = bound.step_whole([(0, 5)]) if at_one_go else bound.step([(0, 5)])
    bound.free = free  # or else its slots would run out
    return scores


def bytes_of(one: Launch) -> int | None:
    """What a launch has to read and write at least; None where that is next to nothing."""
    a, (x, y, _) = one.named(), one.grid
    base = one.name.split("<")[0]
    rules: dict[str, Callable[[], int]] = {
        "matmul_fast": lambda: x * y * a["across"] * a["tile_bytes"],
        "matmul_exact": lambda: x * y * a["across"] * a["tile_bytes"],
        "router_logits": lambda: a["experts"] * a["cols"] * 4 * y,
        "rms_norm": lambda: 4 * a["cols"] * (2 * x + 1),
        "add_rms_norm": lambda: 4 * a["cols"] * (4 * x + 2),
        "quantise_rows": lambda: 5 * a["cols"] * y,
        "swiglu": lambda: 12 * a["width"] * y,
        "add_picks": lambda: 12 * a["cols"] * y,
        "add_sum": lambda: 12 * a["size"],
        "clear": lambda: 4 * a["size"],
        "finish_logits": lambda: 4 * a["vocab"] * x,
    }
    return int(rules[base]()) if base in rules else None


def each_kernel(m: Machine, put: Rows) -> None:
    """Each kernel of a step of the layer and of the stack, alone: time, and bytes over the copy's rate."""
    for name, shape in (("layer", m.sizes.layer), ("stack", fitting(m.sizes.stack, min(_room(m), PART)))):
        with taped(m, shape) as (tape, _, _):
            for kernel in dict.fromkeys(one.name for one in tape.launches):
                _rate(m, put, tape, f"{name}: {kernel}", [one for one in tape.launches if one.name == kernel])
            ffn = [one for one in tape.launches if one.part == "expert_ffn" and one.file == "matmul"]
            _rate(m, put, tape, f"{name}: expert products at batch 1", ffn, least=0.7 if name == "layer" else None)


def _rate(m: Machine, put: Rows, tape: Tape, what: str, launches: list[Launch], least: float | None = None) -> None:
    seconds = m.clock.launches(tape, launches, m.sizes.rounds)
    each = 1e6 * seconds / len(launches)
    most = 5.0 if what.startswith("layer: route_softmax") else None
    put(what, each, f"us a launch, {m.clock.what}", most=most)
    sizes = [bytes_of(one) for one in launches]
    if all(sizes):
        rate = sum(filter(None, sizes)) / seconds / 1e9
        put(f"{what}, rate", rate, "GB/s", share=rate / m.ceilings[COPY], least=least)


def attention(m: Machine, put: Rows) -> None:
    """Attention of one row over long histories: keys and values, each read once for all heads that share them."""
    shape, tape = m.sizes.layer, Tape(m.driver())
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    lanes = next(n for n in LANE_DIMS if 32 * n >= dim)
    device = Device(tape)
    try:
        for tokens in m.sizes.histories:
            splits, kernels = ceil_div(tokens, SPLIT), Kernels(device)
            q, out = (upload(device, np.zeros(heads * dim, np.float32)) for _ in range(2))
            k, v = (upload(device, np.zeros((tokens, kv_heads, dim), np.float16)) for _ in range(2))
            parts = device.empty((splits * heads * (2 + dim),), np.float32)
            sight = upload(device, np.random.default_rng(6).permutation(tokens).astype(np.int32))  # slots lie anywhere
            begin, count = upload(device, np.zeros(1, np.int64)), upload(device, np.full(1, tokens, np.int32))
            status = upload(device, np.zeros(1, np.int32))
            tape.keeps = True
            kernels(f"attention<half_t, {lanes}>", (splits, heads, 1), 128, q, k, v, sight, begin, count, parts, status,
                    heads, kv_heads, dim, heads * dim, tokens, dim**-0.5, shared=16 * (2 + dim))  # fmt: skip
            kernels("attention_merge", (heads, 1, 1), 128, parts, count, out, heads, dim, splits)
            tape.keeps = False
            seconds = m.clock.launches(tape, tape.launches, m.sizes.rounds)
            put(f"attention over {tokens} tokens", 1e6 * seconds, f"us, {m.clock.what}")
            rate = 4 * tokens * kv_heads * dim / seconds / 1e9
            put(f"attention over {tokens} tokens, rate", rate, "GB/s", share=rate / m.ceilings[COPY])
            tape.forget()
    finally:
        device.close()


def decode(m: Machine, put: Rows) -> None:
    """One token of each shape: as the engine's calls do it, and its launches as one graph, which must say the same."""
    for name, shape in (("layer", m.sizes.layer), ("stack", fitting(m.sizes.stack, _room(m)))):
        with taped(m, shape) as (tape, bound, scores):
            begin = perf_counter()
            for _ in range(m.sizes.rounds):
                again(bound)
            put(f"{name} of {shape.layers}: a step", 1e3 * (perf_counter() - begin) / m.sizes.rounds, "ms")
            whole = m.clock.launches(tape, tape.launches, m.sizes.rounds)
            put(f"{name} of {shape.layers}: {m.clock.what}", 1e3 * whole, "ms")
            layers = [one for one in tape.launches if one.part in ("attn_router", "expert_ffn")]
            each = 1e6 * m.clock.launches(tape, layers, m.sizes.rounds) / shape.layers
            put(f"{name}: each layer, {m.clock.what}", each, "us", most=75.0 if name == "layer" else None)
            m.clock.launches(tape, tape.launches, 1)
            equal = bool(np.array_equal(last_logits(tape), scores[0]))
            put(f"{name}: launched again, the same logits", equal)
            assert equal, f"{name}: the launches alone give other logits than the step"
    for name, shape in (("layer", m.sizes.layer), ("stack", fitting(m.sizes.stack, min(_room(m), PART)))):
        _at_one_go(m, put, name, shape)


def _at_one_go(m: Machine, put: Rows, name: str, shape: Shape) -> None:
    """The engine's own graph, from the host's word to the logits on the host, and beside it a step layer by layer."""
    with m.device() as device:
        bound = WholeBound(CudaBackend(device), shape, model=quick(shape))
        bound.run(HISTORY)
        bound.bring()
        scores = [again(bound), *(again(bound, at_one_go=True) for _ in range(2))]
        begin = perf_counter()
        for _ in range(m.sizes.rounds):
            again(bound, at_one_go=True)
        put(f"{name} of {shape.layers}: a step at one go", 1e3 * (perf_counter() - begin) / m.sizes.rounds, "ms")
        graphs = bound.backend.whole.graphs
        put(f"{name}: graphs captured, replays", f"{graphs.captured}, {graphs.replays}")
        equal = all(np.array_equal(one, scores[0]) for one in scores)
        put(f"{name}: at one go, the same logits", equal)
        assert equal and graphs.replays > 0, f"{name}: the graph gives other logits than the step layer by layer"


def last_logits(tape: Tape) -> np.ndarray:
    """What the head's last kernel read."""
    named, stream = tape.launches[-1].named(), tape.stream()
    device = named["logits"].reshape(-1)[: named["vocab"]]
    host = np.empty(device.shape, np.float32)
    tape.read(host, device, stream)
    tape.synchronise(stream)
    return host


def half(m: Machine, put: Rows) -> None:
    """Tokens with all experts on the card and with half of them there, the others sent from locked host memory."""
    for name, shape in (("layer", m.sizes.layer), ("stack", fitting(m.sizes.stack, min(_room(m), PART)))):
        model, said, whole = quick(shape), [], shape.layers * shape.experts * expert_bytes(shape)
        for words, budget in (("all", whole), ("half", whole // 2)):
            with m.device() as device:
                backend = CudaBackend(device, "fast", Sharing(budget))
                bound = Bound(backend, shape, model=model)
                assert backend.tier is not None
                backend.tier.lock(model[1].frames)
                bound.run(HISTORY)
                before, begin = backend.counters(), perf_counter()
                said.append(np.concatenate([bound.step([(0, t)]) for t in range(m.sizes.rounds)]))
                each = 1e3 * (perf_counter() - begin) / m.sizes.rounds
                put(f"{name} of {shape.layers}, {words} of the experts on the card: a step", each, "ms")
                for key in ("experts_hits", "experts_faults", "experts_evictions", "sent_bytes", "send_waits"):
                    put(f"{name}, {words}: {key}", backend.counters()[key] - before[key])
        equal = bool(np.array_equal(*said))
        put(f"{name}: the same logits", equal)
        assert equal, f"{name}: logits depend on what is on the card"


def paging(m: Machine, put: Rows) -> None:
    """An engine whose experts do not all fit: its counters, and the same tokens."""
    said = []
    for settings in ({}, {"expert_cache_bytes": "1MiB"}):
        with engine(m.model, backend=m.backend, precision="fast", **settings) as made:
            said.append(greedy(made, PROMPT, m.sizes.tokens))
            counters = made.counters()["pager"]
    for name in ("faults", "hits", "evictions", "bytes_read"):
        if name in counters:
            put(f"pager: {name}", counters[name])
    put("the same tokens as with all in memory", said[0] == said[1])
    assert said[0] == said[1]


def _room(m: Machine) -> int:
    """Bytes for experts, on host and card alike."""
    driver = m.driver()
    free = min(driver.facts().free, free_memory())
    driver.close(False)
    return free * 2 // 5
