"""The whole engine (batches, pages under a budget, KV slots) with its kernels on an emulated core: the golden text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab.convert import convert
from colibri_lab.engine.engine import Engine
from colibri_lab.ops import select
from tests.oracle import embedded
from tests.oracle.goldens import NEW_TOKENS, error
from tests.parity.models import engine, greedy, logits

from .backend import ArmBackend
from .machine import LEVELS, Machine

ARM = LEVELS[:2]  # plain C has no text of its own to show: test_levels compares it byte by byte
pytestmark = [pytest.mark.arm, pytest.mark.parametrize("machine", ARM, indirect=True, scope="module")]
SMALL = {"threads": 1, "kv_cache_max_slots": 256, "kv_cache_slot_size": 8, "prefill_chunk": 32, "max_batch_size": 1}
Converted = Callable[[str], Path]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("models")

    def at(quantize: str) -> Path:
        made = folder / quantize
        return made if made.exists() else convert(embedded.MODEL, made, quantize=quantize)

    return at


@contextmanager
def emulated(path: Path, machine: Machine, late: bool = False, **how: Any) -> Iterator[Engine]:
    """An engine whose CPU backend is the emulated one."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "CpuBackend", lambda *a: ArmBackend(machine, *a, late=late))
            made = stack.enter_context(engine(path, backend="cpu", **SMALL, **how))
        assert made.describe()["isa"] == machine.level
        yield made


def test_golden_text(machine: Machine, converted: Converted) -> None:
    """fp16 weights, exact: the logits of transformers on the fixed text, and its 64 greedy tokens."""
    golden, path = embedded.load(), converted("fp16")
    ids = golden["ids"].tolist()
    with emulated(path, machine) as made, engine(path) as here:
        theirs = logits(made, ids)
        assert error(theirs, golden["logits"]) < 1e-4
        assert np.array_equal(theirs, logits(here, ids))
        i = ARM.index(machine.level)  # one of the golden prompts each: emulated fp16 takes its time
        assert greedy(made, golden[f"prompt{i}"].tolist(), NEW_TOKENS) == golden[f"tokens{i}"].tolist()


@pytest.mark.parametrize("mode", ["exact", "expert_local"])
def test_int4_under_a_budget(machine: Machine, converted: Converted, mode: str) -> None:
    """Int8 activations, a part of the experts in memory, two_stage: text and log-probabilities of this machine."""
    how = {"precision": "fast", "kv_cache_dtype": "fp16", "expert_cache_bytes": "2MiB", "router": "two_stage"}
    said, faults = [], []
    for opened in (emulated(converted("int4"), machine, attention=mode, **how),
                   engine(converted("int4"), attention=mode, **how)):  # fmt: skip
        with opened as made:
            tokens = list(made.generate("The young lady", max_tokens=40, temperature=0.8, seed=1))
            said.append([(t.id, t.logprob, t.experts.tobytes(), t.weights.tobytes()) for t in tokens])
            faults.append(made.counters()["pager"]["faults"])
    assert said[0] == said[1] and len(said[0]) == 40
    assert faults[0] == faults[1] > 100


def test_pages_that_arrive_while_experts_compute(machine: Machine, converted: Converted) -> None:
    """Few experts in memory, pages one at a time: the core waits for what this process writes into its page table."""
    how = {"precision": "fast", "expert_cache_bytes": "1MiB"}
    with engine(converted("int4"), **how) as made:
        right = greedy(made, embedded.encode("The house was"), 24)
    with emulated(converted("int4"), machine, late=True, engine_mode="async", **how) as made:
        assert greedy(made, embedded.encode("The house was"), 24) == right
        assert made._parts.pager.arrays.waited[0] > 1e6  # nanoseconds, as the core saw it
