"""`backend: cuda` on a card that is not there (card.py): the simulator's bits, and everything given back in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.ops.cuda import CudaBackend
from colibri_lab.ops.device import Device
from colibri_lab.ops.driver import CannotLock, DeviceFull
from colibri_lab.ops.driver_cupy import CupyDriver
from colibri_lab.ops.simulator import SimDevice
from tests.ops.models import Bound, Shape, make
from tests.parity.models import engine, greedy, logits

from .card import LATE, Card, CUDARuntimeError, plug_in

SHAPE = Shape(layers=1, shared=9)
PROMPT = [5, 9, 33, 2, 60, 17, 8]


def steps(backend: CudaBackend, shape: Shape = SHAPE) -> np.ndarray[Any, Any]:
    bound = Bound(backend, shape, model=make(shape, 3))
    return np.concatenate([bound.step([(0, 3), (1, 4), (0, 7)]), bound.step([(1, 9)])])


@pytest.mark.parametrize("late", LATE)
def test_a_card_gives_the_simulators_bits(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    card = plug_in(monkeypatch, Card(late))
    backend = CudaBackend(Device(CupyDriver()))
    assert np.array_equal(steps(backend), steps(CudaBackend(SimDevice("random", 7))))
    assert not card.clean
    backend.close()
    assert card.clean


def test_the_whole_engine(monkeypatch: pytest.MonkeyPatch, converted: dict[str, Path]) -> None:
    card = plug_in(monkeypatch, Card())
    with engine(converted["mixtral"], backend="sim") as made:
        said, scores = greedy(made, PROMPT, 8), logits(made, PROMPT)
    with engine(converted["mixtral"], backend="cuda") as made:
        assert (greedy(made, PROMPT, 8), made.describe()["backend"]) == (said, "cuda")
        assert np.array_equal(logits(made, PROMPT), scores)
        assert "Fake H0" in made.describe()["why_backend"]
    assert card.clean


def test_the_order_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work ends, then memory goes, newest first, then the streams."""
    card = plug_in(monkeypatch, Card())
    backend = CudaBackend(Device(CupyDriver()))
    steps(backend)
    sizes = [e[1] for e in card.log if e[0] == "malloc"]
    card.log.clear()
    backend.close()
    names = [e[0] for e in card.log]
    assert names == ["synchronise"] * 2 + ["free"] * len(sizes) + ["destroy stream"] * 2
    assert [e[1] for e in card.log if e[0] == "free"] == sizes[::-1]


def test_reset_frees_the_context_last(monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card())
    backend = CudaBackend(Device(CupyDriver(), reset=True))
    steps(backend)
    backend.close()
    assert [e[0] for e in card.log[-4:]] == ["forget", "free pools", "free pools", "release context"] and card.clean
    backend.close()  # idempotent


def test_out_of_memory_at_every_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plug_in(monkeypatch, Card())
    bound = Bound(CudaBackend(Device(CupyDriver())), SHAPE, model=make(SHAPE, 3))
    taken = plain.mallocs
    bound.step([(0, 3), (1, 4), (0, 7)])
    assert plain.mallocs == taken > 60, "nothing is taken in a step"
    for n in range(1, plain.mallocs + 1):
        card = plug_in(monkeypatch, Card(fail_malloc=n))
        backend = CudaBackend(Device(CupyDriver()))
        with pytest.raises(DeviceFull, match=r"the GPU has no room for .* lower gpu_cache_bytes"):
            steps(backend)
        assert card.clean, n
        assert steps(backend).size  # there is room again, and nothing of the failure is left
        backend.close()


@pytest.mark.parametrize("kind", ["interrupt_at", "error_at"])
def test_an_end_at_any_call(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Ctrl-C, or an error of CUDA, at any call of the card: `close` gives everything back."""
    plain = plug_in(monkeypatch, Card())
    steps(CudaBackend(Device(CupyDriver())))
    for n in range(1, plain.calls, 7):
        card = plug_in(monkeypatch, Card(**{kind: n}))
        backend = CudaBackend(Device(CupyDriver()))
        with pytest.raises(KeyboardInterrupt if kind == "interrupt_at" else CUDARuntimeError):
            steps(backend)
        card.catch_up()  # a card that is lost has no work any more
        backend.close()
        assert card.clean, n


def test_an_error_while_closing_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card = plug_in(monkeypatch, Card("nothing"))
    backend = CudaBackend(Device(CupyDriver()))
    steps(backend)
    card.error_at = card.calls + 1
    with pytest.raises(CUDARuntimeError, match="illegal"):
        backend.close()
    assert card.clean
    backend.close()


def test_transfers_beside_the_kernels_are_ordered_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `after_sent` a kernel reads what is not there yet; with it the copy is waited for, and counted."""
    plug_in(monkeypatch, Card())
    device = Device(CupyDriver())
    page = np.full(4096, 7, np.uint8)
    target = device.empty((4096,), np.uint8)
    device.send(target, page)
    assert (device.read(target) == 0xFF).all()
    device.after_sent(device.sent())
    assert (device.read(target) == 7).all()
    assert (device.sends, device.send_waits, device.sent_bytes) == (1, 1, 4096)
    device.close()


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from locked memory reads it late; it is let go before its memory is given back, or at the end."""
    from colibri_lab.memory import zeros

    card = plug_in(monkeypatch, Card())
    device = Device(CupyDriver())
    host, target = zeros((8192,), np.uint8), device.empty((8192,), np.uint8)
    device.lock(host)
    device.send(target, host)
    host[:] = 5
    device.settle()
    assert (device.read(target) == 5).all() and device.locked_bytes == 8192
    device.unlock(host)
    assert not card.locked and device.locked_bytes == 0
    device.lock(host)
    device.close()
    assert card.clean
    card.lock_error = CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(CannotLock, match=r"expert_cache_bytes: 0\.007812 MiB of memory cannot be locked.*ulimit"):
        device.lock(host)
    device.unlock(host)  # nothing was locked
    assert not card.locked
