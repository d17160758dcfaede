"""A group of processes whose memory the system holds to a limit, the pages of their files included (Linux cgroups)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri_lab.errors import NotAvailable

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """`with MemoryGroup(limit) as group: group.take(pid)`. NotAvailable where this process may make none."""

    def __init__(self, limit: int, root: Path = ROOT) -> None:
        """limit: bytes."""
        old = (root / "memory").is_dir()  # a hierarchy for each controller, else one for all
        self.folder = (root / "memory" if old else root) / f"colibri-bench-{os.getpid()}"
        files = ("memory.limit_in_bytes", "memory.swappiness") if old else ("memory.max", "memory.swap.max")
        try:
            self.folder.mkdir()
            (self.folder / files[0]).write_text(str(limit))
            if (self.folder / files[1]).exists():  # a system may count no swap
                (self.folder / files[1]).write_text("0")
        except OSError as error:
            self.close()
            raise NotAvailable(
                f"{self.folder}: a memory group cannot be made here ({error.strerror}): run it as root on a system "
                "whose cgroups hold memory, or leave --peer out"
            ) from None

    def take(self, pid: int) -> None:
        """Put a process under the limit; what it has already is not counted."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group; its processes have ended."""
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # a process that has just ended is still counted
                time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
