"""How much memory there is to have, as a container sees it, and memory that is really given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri_lab.kv.slots import SHORT, allocate
from colibri_lab.memory import HUGE, Region, container_room, free_memory, usable_cores, zeros

MIB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def room(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "self").write_text(membership)
    return container_room(tmp_path, tmp_path / "self")


def test_cgroup_v2(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", memory__max="max", memory__current=7 * MIB)
    assert room(tmp_path, "0::/a/b\n") is None
    write(
        tmp_path / "a",
        memory__max=100 * MIB,
        memory__current=90 * MIB,
        memory__stat=f"anon 5\ninactive_file {40 * MIB}",
    )
    assert room(tmp_path, "0::/a/b\n") == 50 * MIB  # the limit sits above; page cache that can go is not used memory
    write(tmp_path / "a" / "b", memory__max=30 * MIB, memory__current=40 * MIB)
    assert room(tmp_path, "0::/a/b\n") == 0
    assert room(tmp_path, "0::/elsewhere/not/mounted\n") is None


def test_cgroup_v1(tmp_path: Path) -> None:
    unlimited = 9223372036854771712
    write(tmp_path / "memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=5)
    write(tmp_path / "memory" / "job", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=24 * MIB)
    (tmp_path / "memory" / "job" / "memory.stat").write_text(f"cache 9\ntotal_inactive_file {4 * MIB}\n")
    assert room(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n") == 44 * MIB


def test_odd_files_are_no_limit(tmp_path: Path) -> None:
    assert container_room(tmp_path, tmp_path / "missing") is None
    write(tmp_path / "x", memory__max="what", memory__current="")
    assert room(tmp_path, "0::/x\n") is None


def test_this_machine() -> None:
    assert 0 < free_memory() and 1 <= usable_cores()


@pytest.mark.parametrize("huge", [True, False])
def test_region(huge: bool) -> None:
    region = Region(5 * HUGE + 123, huge)
    assert region.data.ctypes.data % HUGE == 0 and len(region.data) == 5 * HUGE + 123
    region.data[:] = 3
    region.give_back(HUGE + 1, 3 * HUGE)
    assert region.data[HUGE] == 3 and not region.data[HUGE + 4096 : 3 * HUGE].any() and region.data[3 * HUGE] == 3
    array = zeros((3, 5), np.int32)
    assert array.shape == (3, 5) and not array.any()


def facts(address: int) -> dict[str, str]:
    """What Linux says of the mapping that an address lies in."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside:
            found[name[:-1]] = rest.strip()
    return found


def asks(address: int) -> bool | None:
    """Whether huge pages are asked for there; None: neither so nor refused, as on a system that has none."""
    flags = facts(address)["VmFlags"].split()
    return True if "hg" in flags else False if "nh" in flags else None


THERE = Path("/sys/kernel/mm/transparent_hugepage").exists()
YES, NO = (True, False) if THERE else (None, None)


def kib(address: int) -> int:
    """Memory of the mapping that an address lies in."""
    return int(facts(address)["Rss"].split()[0])


def test_huge_pages_only_where_asked() -> None:
    whole, none = Region(5 * HUGE, True), Region(5 * HUGE, False)
    part = Region(9 * HUGE, range(2 * HUGE - 5, 6 * HUGE + 5))
    assert asks(whole.data.ctypes.data) is YES and asks(none.data.ctypes.data) is NO
    places = (0, 2 * HUGE - 1, 2 * HUGE, 6 * HUGE - 1, 6 * HUGE, 9 * HUGE - 1)
    assert [asks(part.data.ctypes.data + at) for at in places] == [NO, NO, YES, YES, NO, NO]
    for within in (range(5, HUGE), range(HUGE, HUGE), range(3 * HUGE, HUGE)):
        region = Region(3 * HUGE, within)
        assert all(asks(region.data.ctypes.data + at) is NO for at in range(0, 3 * HUGE, MIB))


def test_a_short_text_takes_no_huge_page_of_the_slots() -> None:
    """Keys of 512 bytes: what lies within the first 16 MiB, and a step's staging at the end, are small pages."""
    pool = allocate(4096, 64, 300, 4, 64, "fp16", 1, 1, 100)
    start, size = pool.k.ctypes.data, 512
    before = kib(start)
    pool.k[:1000] = pool.k[pool.staging :] = 1
    assert 0 < (kib(start) - before) * 1024 < 1100 * size
    assert asks(start) is NO and asks(start + (pool.staging + 299) * size) is NO
    assert asks(start + SHORT) is YES
    many = allocate(8192, 256, 300, 4, 64, "fp16", 2, 16, 100)  # slots that have just been begun take 64 MiB here
    start = many.k.ctypes.data
    assert [asks(start + at * MIB) for at in (16, 63, 64, 1000)] == [NO, NO, YES, YES]
