"""The device's frames and the page table that kernels read there: experts come from the host's frames, beside kernels.

A transfer waits for the kernels that used its frames before, kernels wait for the transfers of what they read; nothing
else does, so the transfers of one layer and what is sent ahead run while other kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns as clock
from time import sleep
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..events import PageKind
from .device import Device
from .layout import PAGE
from .tier import Tier
from .types import BY_HEAT, COMING, I32, ON_CPU, ON_GPU, ExpertPages, MissingPage

MIB = 1 << 20
SELDOM = 16  # steps
Places = np.ndarray[Any, np.dtype[np.int8]]
LEFT = 256 * MIB  # of the card's memory, to whoever else needs some
KEY = "settings: gpu_cache_bytes"


class DeviceFrames:
    """frames: uint8 [runs * pages * PAGE] on the device, in one piece; table: int32 [L * E, pages] of frame numbers.

    pages_copied counts what was sent, runs_copied in how many transfers.
    """

    def __init__(self, device: Device, pages: ExpertPages, per_expert: int, top_k: int, budget: int | None,
                 places: Places) -> None:  # fmt: skip
        """budget: bytes for experts, None: what the card has left, at most all that may come here; ConfigError where
        one token's do not fit. places [L, E]: ON_GPU, ON_CPU or BY_HEAT."""
        self._device, self._pages, self._per_expert, self._places = device, pages, per_expert, places
        rows, self.experts = pages.table.shape[0] * pages.table.shape[1], pages.table.shape[1]
        self._run_bytes, most = per_expert * PAGE, int((places != ON_CPU).sum())
        self.least, self.most = min(top_k, most), most  # experts that must fit, and that may come
        if budget is None:
            left = device.driver.facts().free - rows * per_expert * 4 - LEFT
            budget = max(self.least * self._run_bytes, left)
        capacity = min(budget // self._run_bytes, most)
        if capacity < self.least:
            raise ConfigError(
                f"{KEY}: {budget / MIB:.4g} MiB is too little for this model: one token needs {top_k} experts at once, "
                f"so the least is {self.least * self._run_bytes / MIB:.4g} MiB"
            )
        spare = min(max(top_k, capacity // 16), capacity - self.least) if capacity < most else 0
        self.tell: Callable[[int, int, int], None] | None = None  # (PageKind, layer, expert) of who comes and goes
        self.tier = Tier(capacity, spare, self._leaves)
        self.frames = device.empty((capacity * self._run_bytes,), np.uint8)
        self.table = device.empty((rows, per_expert), np.int32)
        self._numbers = np.arange(capacity * per_expert, dtype=np.int32).reshape(capacity, per_expert)
        self._used: dict[int, Any] = {}  # run -> the event after which nobody reads it
        self._looked: dict[int, Any] = {}  # key -> the event after which nobody reads its row of the table
        self._unsettled = False  # whether a transfer may still read the host's frames
        self._coming: dict[int, Any] = {}  # key -> the event of a transfer that kernels have not waited for
        self._step, self._last = 0, np.zeros(rows, np.int64)  # of each expert's last use
        self.pages_copied = self.runs_copied = 0

    def next_step(self) -> None:
        """A step begins."""
        self._step += 1

    def split(self, layer: int, experts: Sequence[int]) -> tuple[list[int], list[int]]:
        """(on the device, on the processor) of the experts that a wave wants.

        By heat: those that are on the device or pinned, and others while there is room; an expert that SELDOM steps
        did without makes room.
        """
        room = self._room()
        sides: tuple[list[int], list[int]] = [], []  # in the order of ON_GPU, ON_CPU
        for e in experts:
            key, place = layer * self.experts + e, self._places[layer, e]
            if place == BY_HEAT:
                here = self._has(key) or key in self.tier.pinned
                place = ON_GPU if here or room > 0 else ON_CPU
                room -= place == ON_GPU and not here
            sides[place].append(e)
        return sides

    def _room(self) -> int:
        """Experts that may come without pushing out one that is in use."""
        room = self.tier.keep - len(self.tier.held)
        for key in self.tier.held:
            if self._step - self._last[key] < SELDOM:
                break
            room += key not in self.tier.pinned
        return room

    def parts(self, layer: int, experts: Sequence[int]) -> list[list[int]]:
        """Experts in parts that fit on the device, those that are there already first."""
        here = [e for e in experts if layer * self.experts + e in self.tier.held]
        other = [e for e in experts if layer * self.experts + e not in self.tier.held]
        return [part for part in (here, *_cut(other, self.tier.keep)) if part]

    def bring(self, layer: int, experts: Sequence[int]) -> None:
        """Kernels launched from now on find these experts through the table. Waits for pages on their way to the host.

        MissingPage before anything is sent.
        """
        keys = [layer * self.experts + e for e in experts]
        missing = {key: self._arrived(layer, e) for key, e in zip(keys, experts, strict=True) if not self._has(key)}
        busy = set(keys)
        for key in keys:
            if key not in missing:
                self.tier.find(key, busy)
        for key, host in missing.items():
            self._send(key, self.tier.admit(key, busy), host)
        for key in keys:
            if (event := self._coming.get(key)) is not None:
                self._device.after_sent(event)
                del self._coming[key]

    def done(self, layer: int, experts: Sequence[int]) -> None:
        """The kernels that read these have been launched."""
        event = self._device.used()
        for key in (layer * self.experts + e for e in experts):
            self._used[self.tier.held[key]] = self._looked[key] = event
            self._last[key] = self._step

    def absent(self) -> list[tuple[int, int]]:
        """(layer, expert) of those that may come and are not here."""
        if len(self.tier.held) == self.most:
            return []
        here = np.zeros(self._places.size, bool)
        here[list(self.tier.held)] = True
        away = (~here.reshape(self._places.shape)) & (self._places != ON_CPU)
        return [(int(layer), int(e)) for layer, e in np.argwhere(away)]

    def arrived(self) -> None:
        """Kernels launched from now on begin after all transfers so far."""
        for key in list(self._coming):
            self._device.after_sent(self._coming.pop(key))

    def touched(self, layer: int, experts: Sequence[int]) -> None:
        """A whole step used these, which are here and stay: there is room for all."""
        for key in (layer * self.experts + e for e in experts):
            self.tier.find(key, ())
            self._last[key] = self._step

    def lacking(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """Those that are not held on the device. The others stay until this layer's wave has computed: it begins with
        what is here (`parts`), and guesses take nobody's place."""
        return [e for e in experts if layer * self.experts + e not in self.tier.held]

    def warm(self, layer: int, expert: int) -> None:
        """Send what may be asked for soon, where it costs nobody his place; the host has it."""
        key = layer * self.experts + expert
        host = self._pages.table[layer, expert, : self._per_expert]
        if self._places[layer, expert] == ON_CPU or (host < 0).any():
            return
        run = self.tier.guess(key)
        if run is not None:
            self._send(key, run, host.copy())

    @property
    def keys(self) -> list[int]:
        """layer * experts + expert of those that are here."""
        return [*self.tier.held, *self.tier.guessed]

    def pin(self, key: int, pinned: bool) -> None:
        """See Tier.pin."""
        self.tier.pin(key, pinned)

    def lock(self, memory: np.ndarray[Any, Any]) -> None:
        """The host's frames, so that transfers read them directly."""
        self._device.lock(memory)

    def unlock(self, memory: np.ndarray[Any, Any]) -> None:
        self._device.unlock(memory)

    def settle(self) -> None:
        """Return when no transfer reads the host's frames any more."""
        if self._unsettled:
            self._device.settle()
            self._unsettled = False

    def guesses(self, wanted: bool) -> None:
        """See Tier.guesses."""
        self.tier.guesses(wanted)

    @property
    def bytes(self) -> int:
        """Of device memory for experts."""
        return self.tier.capacity * self._run_bytes

    def counters(self) -> dict[str, int]:
        """Experts by what became of them, pages that were sent, and in how many transfers."""
        return {**self.tier.counters(), "pages_sent": self.pages_copied, "page_runs_sent": self.runs_copied}

    def _has(self, key: int) -> bool:
        return key in self.tier.held or key in self.tier.guessed

    def _arrived(self, layer: int, expert: int) -> I32:
        frames, begin = self._pages.table[layer, expert, : self._per_expert], clock()
        while (frames == COMING).any():
            sleep(2e-5)
            self._pages.waited[0] += -begin + (begin := clock())
        if (frames < 0).any() or (frames >= len(self._pages.frames)).any():
            raise MissingPage(f"layer {layer} expert {expert} is not in memory")
        return frames.copy()

    def _send(self, key: int, run: int, host: I32) -> None:
        """An expert to a run that was made ready for it; it is not there if that fails."""
        if self.tell is not None:
            self.tell(PageKind.SENT, *divmod(key, self.experts))
        try:
            self._transfer(key, run, host)
        except BaseException:
            self.tier.forget(key)
            raise

    def _leaves(self, key: int) -> None:
        if self.tell is not None:
            self.tell(PageKind.LEFT, *divmod(key, self.experts))

    def _transfer(self, key: int, run: int, host: I32) -> None:
        """All pages of an expert, neighbours on the host in one transfer, and its row of the table."""
        for event in (self._used.pop(run, None), self._looked.pop(key, None)):
            if event is not None:
                self._device.after_used(event)
        self._unsettled = True
        first = run * self._per_expert
        for part in np.split(np.arange(len(host)), np.flatnonzero(np.diff(host) != 1) + 1):
            begin, end = first + int(part[0]), first + int(part[-1]) + 1
            source = self._pages.frames[host[part[0]] : host[part[-1]] + 1].reshape(-1)
            self._device.send(self.frames[begin * PAGE : end * PAGE], source)
            self.runs_copied += 1
        self.pages_copied += len(host)
        self._device.send(self.table[key], self._numbers[run])
        self._coming[key] = self._device.sent()


def _cut(experts: list[int], most: int) -> list[list[int]]:
    return [experts[i : i + most] for i in range(0, len(experts), most)]
