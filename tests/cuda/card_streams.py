"""Streams, events and graphs of the card that is not there (card.py): work is done as late as it may be."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .card import Card


class Queue:
    """Work of a stream, in order, and how much of it is done."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def catch_up(self, to: int | None = None) -> None:
        to = len(self.work) if to is None else to
        while self.done < to:
            self.done += 1
            self.work[self.done - 1]()

    @property
    def idle(self) -> bool:
        return self.done == len(self.work)


class Graph:
    """Launches as they were captured: (file, name, grid, threads, arguments, shared)."""

    def __init__(self, card: Card, launches: list[tuple[Any, ...]]) -> None:
        self.card, self.launches = card, launches
        card.graphs.add(self)

    def launch(self, stream: Stream) -> None:
        self.card.call("replay", stream.ptr, len(self.launches))
        assert self in self.card.graphs and self.launches, "a graph of nothing"
        sim = self.card.sim
        for one in self.launches:
            stream.give(lambda one=one: sim.launch(*one, None))


class Stream:
    def __init__(self, card: Card) -> None:
        self.card, self.ptr, self.queue = card, card.number(), Queue()
        self.captured: list[tuple[Any, ...]] | None = None
        second = len(card.streams) % 2 == 1
        self.eager = card.late == "nothing" or (card.late == "kernels" and second)
        weakref.finalize(self, card.note, "destroy stream", self.ptr)

    def give(self, work: Callable[[], None]) -> None:
        self.queue.work.append(work)
        if self.eager:
            self.queue.catch_up()

    def begin_capture(self) -> None:
        self.card.call("capture", self.ptr)
        self.captured = []

    def end_capture(self) -> Graph:
        assert self.captured is not None, "no capture has begun"
        launches, self.captured = self.captured, None
        self.card.call("captured", self.ptr, len(launches))
        return Graph(self.card, launches)

    def launch(self, *one: Any) -> None:
        """A kernel, now or in the graph that is being made."""
        if self.captured is None:
            sim = self.card.sim
            self.card.loaded.add(one[1])
            self.give(lambda: sim.launch(*one, None))
        else:
            assert one[1] in self.card.loaded, f"{one[1]} is loaded inside a capture"
            self.captured.append(one)

    def synchronize(self) -> None:
        self.card.call("synchronise", self.ptr)
        self.queue.catch_up()

    def wait_event(self, event: Event) -> None:
        self.card.call("wait", self.ptr, event.of)
        queue, at = event.queue, event.at
        self.give(lambda: queue.catch_up(at))

    def __enter__(self) -> None:
        self.card.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.card.current.pop()


class Event:
    def __init__(self, card: Card) -> None:
        self.card = card

    def record(self, stream: Stream) -> None:
        self.card.call("record", stream.ptr)
        self.queue, self.at, self.of = stream.queue, len(stream.queue.work), stream.ptr

    @property
    def done(self) -> bool:
        return self.queue.done >= self.at
