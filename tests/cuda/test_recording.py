"""What a recording says that threads did, against what is known of small kernels."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.ops.examples import EXAMPLES, activation, norm
from colibri_lab.ops.recording import BARRIER, READ, SHARED, WARP, WRITE, Recording, RecordingDevice, TooMuch
from colibri_lab.ops.trial import changed


def recorded(example, order: str = "forward", texts: dict[str, str] | None = None) -> Recording:
    device = RecordingDevice(order, texts=texts)
    got = example.run(device)
    assert texts or not example.differences(got)
    (one,) = device.recordings
    return one


def accesses(one: Recording, kind: int, name: str) -> list[tuple[int, int, int]]:
    """Sorted (block, thread, element)."""
    events, element = one.elements()
    mine = (events["kind"] == kind) & np.array([one.name(a) == name for a in events["array"].tolist()], bool)
    blocks, threads = events["block"][mine].tolist(), events["thread"][mine].tolist()
    return sorted(zip(blocks, threads, element[mine].tolist(), strict=True))


def test_an_elementwise_kernel_touches_each_element_once() -> None:
    one = recorded(activation(2, 300))
    want = [(2 * y + i // 256, i % 256, y * 300 + i) for y in range(2) for i in range(300)]
    for kind, name in ((READ, "up"), (WRITE, "hidden")):
        assert accesses(one, kind, name) == sorted(want)
    assert set(accesses(one, READ, "gate")) == set(want)
    assert not accesses(one, WRITE, "gate") and set(one.events["kind"].tolist()) == {READ, WRITE}
    assert one.conflicts() == []


def test_a_block_that_sums_meets_at_barriers() -> None:
    """rms_norm with two warps: five steps of a shuffle each way, one word a warp, two barriers, all read both words."""
    example = norm(rows=2, cols=100, threads=64)
    one = recorded(example)
    kinds, threads = one.events["kind"], 64
    assert (kinds == BARRIER).sum() == 2 * 2 * threads and (kinds == WARP).sum() == 5 * 2 * threads
    assert accesses(one, WRITE, "shared") == [(b, 32 * w, w) for b in range(2) for w in range(2)]
    assert accesses(one, READ, "shared") == [(b, t, w) for b in range(2) for t in range(threads) for w in range(2)]
    out = accesses(one, WRITE, "out")
    assert out == sorted((b, i % threads, b * 100 + i) for b in range(2) for i in range(100))
    phase = one.events["phase"][(kinds == WRITE) & (one.events["array"] == SHARED)]
    assert set(phase.tolist()) == {0}
    assert set(one.events["phase"][(kinds == READ) & (one.events["array"] == SHARED)].tolist()) == {1}
    lines = {line for line in one.events["line"].tolist() if line}
    assert len(lines) == 3, "a shuffle and two barriers, each with its line"


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_right_kernels_have_no_conflict_in_any_order(name: str, order: str) -> None:
    example = EXAMPLES[name]()
    one, other = recorded(example, order), recorded(example)
    assert one.conflicts() == [] and len(one.events)
    assert np.array_equal(np.sort(one.events, order=["block", "thread", "phase", "kind", "array", "at"]),
                          np.sort(other.events, order=["block", "thread", "phase", "kind", "array", "at"]))  # fmt: skip


def test_a_missing_barrier_is_a_conflict_that_names_both_threads() -> None:
    text = changed("rms_norm", "room[warp] = v;\n  __syncthreads();", "room[warp] = v;")
    met = recorded(norm(), texts={"rms_norm": text}).conflicts()
    assert [(c.array, c.block, c.phase, c.writer, c.does) for c in met] == [("shared", b, 0, 0, "read") for b in (0, 1)]
    assert "block 0, after 0 barriers: thread 0 writes shared[0], thread 32 reads it" in str(met[0])


def test_two_blocks_that_write_one_place() -> None:
    text = changed("rms_norm", "out[(i64)blockIdx.x * cols + i]", "out[i]")
    met = recorded(norm(), texts={"rms_norm": text}).conflicts()
    assert met[0].array == "out" and met[0].does == "write"


def test_more_than_there_is_room_for() -> None:
    device = RecordingDevice(most=100)
    with pytest.raises(TooMuch, match=r"rms_norm: \d+ events, a recording has room for 100"):
        norm().run(device)
    assert not device.recordings
