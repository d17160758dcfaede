"""Who reads experts on this machine."""

from __future__ import annotations

from typing import Any

from ..ops.build import KernelError
from .queue import QueueTransfer
from .reader import ExpertFile, Reader
from .threads import ThreadTransfer
from .transfer import Transfer


def open_transfer(file: ExpertFile, depth: int, piece: int | None, kernels: bool) -> Transfer[Any]:
    """The system's queue where kernels in C compute, since they look there for their pages, and where the file can be
    read past the page cache; else threads.

    depth: reads under way at a time. piece: bytes after which the page table is told, None: at the end of an expert.
    kernels: whether the backend is in C.
    """
    reader = Reader(file, piece)
    if kernels and reader.direct:
        try:
            queue = QueueTransfer.open(reader, depth)
        except KernelError:
            queue = None
        if queue is not None:
            return queue
    return ThreadTransfer(reader, depth)
