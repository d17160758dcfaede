"""What this machine offers the engine and the lab, checked one by one, each with the way to better it.

Nothing is changed: what a check writes (a few kilobytes, to try direct reads) is removed again.
"""

from __future__ import annotations

import importlib.metadata as packages
import importlib.util
import json
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .memory import container_limits, free_memory, usable_cores
from .ops import build, isa
from .ops import gpu as cards
from .paths import cache_dir

GOOD, NOTE, BAD = "good", "note", "bad"  # note: it works, and could be better; bad: something does not work
GIB = 1 << 30
NEEDED = ("numpy", "pydantic", "anywidget", "ipykernel", "jupyterlab")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass(frozen=True)
class Finding:
    """One check. do: what would better it, where that is anything."""

    what: str
    state: str
    says: str
    do: str = ""


def examine(folder: Path | None = None, root: Path = Path("/")) -> list[Finding]:
    """All checks. folder: where models lie (default: the cache folder); root: of /sys, /proc and /dev."""
    folder = nearest(folder or cache_dir())
    found = [versions(), processor(root), compiler(), memory(root), huge_pages(root), swappiness(root)]
    return [*found, *disk(folder, root), cache(), gpu(root), browser(), page()]


def in_words(found: Sequence[Finding]) -> str:
    """A line for each, and one more for what would better it."""
    lines = [f"{f.state:5} {f.what:13} {f.says}\n" + (f"{'':20}-> {f.do}\n" if f.do else "") for f in found]
    return "".join(lines)


def as_json(found: Sequence[Finding]) -> str:
    """The same as one line for programs."""
    return json.dumps([asdict(f) for f in found]) + "\n"


def versions() -> Finding:
    told, missing = (
        [f"colibri-lab {_version('colibri-lab') or 'of a checkout'}, Python {platform.python_version()}"],
        [],
    )
    for name in NEEDED:
        found = _version(name)
        told.append(f"{name} {found}") if found else missing.append(name)
    if missing:
        return Finding("packages", BAD, f"missing: {', '.join(missing)}", "pip install colibri-lab")
    return Finding("packages", GOOD, ", ".join(told))


def processor(root: Path) -> Finding:
    levels = ", ".join(isa.available())
    says = f"{_cpu(root)}; kernels for {levels}; {usable_cores()} cores to use"
    governor = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor and governor != "performance":
        return Finding("processor", NOTE, f"{says}; governor {governor}", "cpupower frequency-set -g performance")
    if isa.available()[0] == "plain" and platform.machine().lower() in ("x86_64", "amd64"):
        return Finding("processor", NOTE, says, "AVX2 would be several times as fast; a virtual machine may hide it")
    return Finding("processor", GOOD, says)


def compiler() -> Finding:
    """Compiles the kernels of the best level where that has not been done yet (some seconds)."""
    try:
        path = build.compiler()
        build.load(isa.choose())
    except (build.KernelError, ValueError) as error:
        return Finding("compiler", BAD, str(error), "without the kernels only backend: reference runs, slowly")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    return Finding("compiler", GOOD, f"{path}: {said}; the kernels for {isa.choose()} load")


def memory(root: Path) -> Finding:
    places = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    free, limits = free_memory(*places), container_limits(*places)
    says = f"{free / GIB:.1f} GiB free"
    if limits:
        says += f", {min(limit for limit, _ in limits) / GIB:.1f} GiB allowed in this container"
    if free < 2 * GIB:
        return Finding("memory", NOTE, says, "the embedded model needs 0.1 GiB; for others set expert_cache_bytes")
    return Finding("memory", GOOD, says)


def huge_pages(root: Path) -> Finding:
    chosen = _read(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", GOOD, chosen)
    do = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: memory is read a fifth faster"
    return Finding("huge pages", NOTE, chosen or "not known here", do if chosen else "")


def swappiness(root: Path) -> Finding:
    value = _read(root / "proc/sys/vm/swappiness")
    sizes = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    if sizes.get("SwapTotal", "").split()[:1] == ["0"]:
        return Finding("swap", GOOD, "there is none")
    if not value.isdigit():
        return Finding("swap", NOTE, "not known here")
    if int(value) > 10:
        do = "sysctl vm.swappiness=10, or experts in memory are swapped out"
        return Finding("swap", NOTE, f"swappiness {value}", do)
    return Finding("swap", GOOD, f"swappiness {value}")


def disk(folder: Path, root: Path) -> Iterator[Finding]:
    """What lies under a folder: the kind of disk, its room, and whether it takes direct reads."""
    device = folder.stat().st_dev
    place = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = next((p / "queue" for p in (place, place.parent) if (p / "queue").is_dir()), None)
    if queue is None:
        yield Finding("disk", NOTE, f"{folder}: of no kind known here (a network or memory file system)")
    else:
        kind, scheduler = _kind(queue), _read(queue / "scheduler").partition("[")[2].partition("]")[0] or "none"
        says, slow = f"{folder}: {queue.parent.name}, {kind}, scheduler {scheduler}", kind == "spinning"
        do = "experts on a spinning disk are read many times as slowly" if slow else ""
        yield Finding("disk", NOTE if slow else GOOD, says, do)
    room = shutil.disk_usage(folder).free
    little = "" if room > 5 * GIB else "a converted model needs room of its own"
    yield Finding("room", NOTE if little else GOOD, f"{room / GIB:.1f} GiB free", little)
    yield direct_reads(folder)


def _kind(queue: Path) -> str:
    name = queue.parent.name
    if name.startswith(("vd", "xvd")):  # whatever it says of spinning, the host knows
        return "of a virtual machine"
    return "NVMe" if name.startswith("nvme") else "spinning" if _read(queue / "rotational") == "1" else "solid"


def direct_reads(folder: Path) -> Finding:
    """Tries one, since some file systems take the flag and then refuse."""
    without = "reads go through the page cache and are dropped from it: slower, and right"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, mmap.mmap(-1, 4096) as target:
            file.write(bytes(4096))
            file.flush()
            direct = os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            try:
                os.preadv(direct, [target], 0)
            finally:
                os.close(direct)
    except OSError as error:
        return Finding("direct reads", NOTE, f"{folder}: {error.strerror}", without)
    taken = hasattr(os, "O_DIRECT")
    return Finding(
        "direct reads", GOOD if taken else NOTE, "taken" if taken else "not offered here", "" if taken else without
    )


def cache() -> Finding:
    folder, usable = cache_dir(), nearest(cache_dir())
    if os.access(usable, os.W_OK | os.X_OK):
        return Finding("cache folder", GOOD, str(folder))
    return Finding("cache folder", BAD, f"{folder}: {usable} may not be written", "COLIBRI_CACHE names another folder")


def gpu(root: Path) -> Finding:
    """In one line; `gpus` has all of it."""
    driver = _read(root / "proc/driver/nvidia/version").partition("\n")[0]
    if not driver:
        return Finding("GPU", GOOD, "no NVIDIA driver here; the engine runs on the processor")
    lacking = cards.trouble()
    if lacking is None:
        return Finding("GPU", GOOD, f"{driver}; the engine runs on the GPU; doctor --gpu says more")
    return Finding("GPU", NOTE, f"{driver}; the engine runs on the processor: {lacking.says}", lacking.do)


def gpus(root: Path = Path("/")) -> list[Finding]:
    """All that a GPU needs, up to the first thing that is missing, which is bad; and memory that can be locked."""
    found = [Finding(c.what, GOOD if c.fine else BAD, c.says, "" if c.fine else c.do) for c in cards.checks(root)]
    limit, says = cards.locked_limit()
    if limit is None:
        return [*found, Finding("locked memory", GOOD, says)]
    do = (
        "the driver locks expert_cache_bytes of memory; where it keeps to this limit, raise it in limits.conf (memlock)"
    )
    return [*found, Finding("locked memory", NOTE, says, do)]


def browser() -> Finding:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        return Finding("browser", NOTE, "no Chromium", "of use for make test only: apt install chromium")
    return Finding("browser", GOOD, found)


def page() -> Finding:
    if importlib.util.find_spec("voila") is None:
        return Finding(
            "page", NOTE, "Voila is not installed", "for colibri-lab board: pip install 'colibri-lab[voila]'"
        )
    return Finding("page", GOOD, f"voila {_version('voila')}")


def nearest(folder: Path) -> Path:
    """The folder, or the first one above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())


def _version(name: str) -> str | None:
    try:
        return packages.version(name)
    except packages.PackageNotFoundError:
        return None


def _cpu(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # another system, or not ours to see
        return ""
