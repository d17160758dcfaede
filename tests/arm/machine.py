"""An emulated Arm core with the kernels of one level on it: cross-compiled once per content, called through pipes."""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from colibri_lab.ops import build, isa
from colibri_lab.ops.types import U8

TOP = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("driver.c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = {COMPILER: "gcc-aarch64-linux-gnu and libc6-dev-arm64-cross", EMULATOR: "qemu-user"}
LEVELS = ("dotprod", "neon", "plain")
CORES = {"dotprod": "cortex-a76", "neon": "cortex-a72", "plain": "cortex-a72"}  # the latter two lack sdot
STRICT = ("-Wall", "-Wextra", "-Werror", "-static")
SIZEOF, BIND, EMBED, ATTN_ROUTER, EXPERT_FFN, HEAD, FIRST_STAGE, SECOND_STAGE, RUN, SETTLE = range(10)  # as in driver.c


class Machine:
    """A process under the emulator. RuntimeError when a tool is missing, or the process ended: the message says how."""

    def __init__(self, level: str, core: str | None = None) -> None:
        self.level, self._memory = level, os.memfd_create("kernels")
        self.bound: object = None  # the backend whose model the process has
        command = [tool(EMULATOR), "-cpu", core or CORES[level], str(program(level)), str(self._memory)]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, pass_fds=(self._memory,))
        self.isa = self._read(16).rstrip(b"\0").decode()

    def call(self, *numbers: int, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The kernel's result; `meanwhile` again and again until it is there."""
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("=6q", *numbers, *[0] * (6 - len(numbers))))
        self._process.stdin.flush()
        while not select.select([self._process.stdout], [], [], 0.001)[0]:
            meanwhile()
        return int(struct.unpack("=q", self._read(8))[0])

    def memory(self, size: int) -> U8:
        """Zeroed bytes that the next BIND maps: what is written here, the kernels see, and the other way round."""
        os.ftruncate(self._memory, 0)
        os.ftruncate(self._memory, size)
        return np.frombuffer(mmap.mmap(self._memory, size), np.uint8)

    def close(self) -> None:
        self._process.communicate()  # its input ends, and so does it
        os.close(self._memory)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            _, said = self._process.communicate()
            raise RuntimeError(f"the emulated process ended ({self._process.returncode}): {said.decode().strip()}")
        return data


def tool(name: str) -> str:
    found = shutil.which(name)
    if not found:
        raise RuntimeError(f"no {name} for the tests of the Arm levels: install the Debian package {PACKAGES[name]}")
    return found


def program(level: str) -> Path:
    """The compiled driver, kept in build/arm under a name made of sources, flags and compiler. No warning passes."""
    kernels = build.source().parent
    flags = [flag for flag in build.COMMON if flag not in ("-shared", "-fPIC")]
    command = [tool(COMPILER), *flags, *isa.FLAGS[level], *STRICT, f"-I{kernels}"]
    digest = hashlib.sha256(" ".join(command).encode())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout)
    for path in (DRIVER, *sorted(kernels.iterdir())):
        digest.update(path.read_bytes())
    folder = TOP / "build" / "arm"
    made = folder / f"{level}-{digest.hexdigest()[:20]}"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            new = Path(aside) / "driver"
            done = subprocess.run([*command, str(DRIVER), "-o", str(new), "-lm"], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{COMPILER} could not compile level {level}:\n{done.stderr}")
            new.rename(made)
    return made
