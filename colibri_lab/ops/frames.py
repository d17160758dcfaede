"""The device's frames: each mirrors one of the host's arena, and takes a page when a kernel first needs it there."""

from __future__ import annotations

from time import perf_counter_ns as clock
from time import sleep
from typing import Any

import numpy as np

from .device import Device
from .layout import PAGE
from .types import COMING, I32, ExpertPages, MissingPage


class DeviceFrames:
    """frames: uint8 [F * PAGE] on the device. pages_copied counts what was sent, runs_copied in how many transfers."""

    def __init__(self, device: Device, pages: ExpertPages, per_expert: int) -> None:
        self._device, self._pages, self._per_expert = device, pages, per_expert
        self.frames = device.empty((pages.frames.size,), np.uint8)
        self._owner = np.full(len(pages.frames), -1, np.int64)  # which page lies in a frame of the device
        self.pages_copied = self.runs_copied = 0

    def tables(self, layer: int, experts: list[int]) -> I32:
        """int32 [experts, pages] of frames that hold these experts on the device now. Waits for pages that are coming.

        MissingPage before anything is copied.
        """
        found = np.stack([self._arrived(layer, e) for e in experts])
        for e, frames in zip(experts, found, strict=True):
            self._copy(frames, (layer * self._pages.table.shape[1] + e) * self._per_expert)
        return found

    def _arrived(self, layer: int, expert: int) -> I32:
        frames, begin = self._pages.table[layer, expert, : self._per_expert], clock()
        while (frames == COMING).any():
            sleep(2e-5)
            self._pages.waited[0] += -begin + (begin := clock())
        if (frames < 0).any() or (frames >= len(self._pages.frames)).any():
            raise MissingPage(f"layer {layer} expert {expert} is not in memory")
        return frames.copy()

    def _copy(self, frames: I32, first: int) -> None:
        """Pages `first`, `first` + 1, ... that the device lacks, neighbours in one transfer."""
        lacking = np.flatnonzero(self._owner[frames] != first + np.arange(len(frames)))
        for run in np.split(lacking, np.flatnonzero(np.diff(lacking) > 1) + 1):
            for part in np.split(run, np.flatnonzero(np.diff(frames[run]) != 1) + 1):
                if not len(part):
                    continue
                begin, end = int(frames[part[0]]), int(frames[part[-1]]) + 1
                host: np.ndarray[Any, Any] = self._pages.frames[begin:end].reshape(-1)
                self._device.write(self.frames[begin * PAGE : end * PAGE], host)
                self._owner[begin:end] = first + part
                self.pages_copied += len(part)
                self.runs_copied += 1
