"""The expert pager: makes the experts of a step present in frames, and keeps the page table that kernels read."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from time import perf_counter_ns as clock
from typing import Any

from ..errors import PagerError
from ..events import PageKind
from ..ops.types import ABSENT
from .phases import PhaseSplit
from .residency import Residency
from .ticket import Ticket
from .transfer import Flight, Transfer, land


class Pager(Residency):
    """Puts experts into memory: at once with `acquire`, or while others compute with `request` and `release`."""

    def __init__(self, *, transfer: Transfer[Any], **more: Any) -> None:
        """more: see Residency."""
        self._transfer = transfer
        self.decode = False  # whether the running step only decodes
        self.context = 1  # positions of its longest sequence
        self.missed: list[int] = []  # experts of the running layer that were not in memory, for prefetchers
        self._held: dict[int, int] = {}  # key -> tickets that hold it
        self._split = PhaseSplit()
        self.faults = self.hits = self.pin_hits = self.bytes_read = self.wait_ns = 0
        super().__init__(transfer=transfer, **more)

    @property
    def room(self) -> int:
        """Experts that may be asked for at once: all that fit, but no more than can be read in well under a second."""
        return self._room

    @property
    def all_bytes(self) -> int:
        """Bytes read so far, asked for or ahead."""
        return self.bytes_read + self.ahead.all.bytes

    def reading_ns(self) -> int:
        """How long reads have been under way so far, however many at a time."""
        return self._transfer.reading_ns()

    @property
    def direct(self) -> bool:
        """Whether pages are read past the page cache (O_DIRECT)."""
        return self._transfer.direct

    @property
    def reads(self) -> str:
        """Who reads: the system's "queue", or "threads"."""
        return self._transfer.way

    def begin(self, step: int, decode: bool, context: int) -> None:
        """A step begins: its number, whether all its rows decode, and the length of its longest sequence."""
        self.step, self.decode, self.context, self.missed = step, decode, context, []
        self._split.enter(decode, self._moving())
        if decode and self._pins:
            for key in self._pins.next_token():
                self._pin(key, False)

    def acquire(self, layer: int, wanted: Sequence[int]) -> None:
        """Return when all wanted experts (distinct, at most `room`) are in memory, or in a faster tier; they stay until
        the next call."""
        asked = wanted if self.above is None else self.above.lacking(layer, wanted)
        missing = self._find(layer, asked)
        if missing:
            base = layer * self.experts
            ticket = Ticket(layer, asked, clock())
            self._open(ticket, missing, {base + expert for expert in asked})
            failed: BaseException | None = None
            try:
                self._transfer.load(ticket.reads)
            except BaseException as error:
                failed = error
            failed = self._close(ticket) or failed
            wait = clock() - ticket.asked_ns if len(ticket.guessed) < len(missing) else 0
            self._count(ticket, wait)
            if failed is not None:
                raise failed
        self._used(layer, wanted)

    def request(self, layer: int, wanted: Sequence[int]) -> Ticket | None:
        """Begin to read what is missing of the wanted experts, which must fit (see `fits`), and hold them all.

        Their pages are COMING in the page table until they arrive. What is asked for now is read before any guess.
        None where all experts of the model are in memory: nobody can be thrown out, so nobody need be held.
        """
        missing, base = self._find(layer, wanted), layer * self.experts
        if not missing and self.resident == self.frames.most:
            self._used(layer, wanted)
            return None
        for expert in wanted:
            self._held[base + expert] = self._held.get(base + expert, 0) + 1
        ticket = Ticket(layer, wanted, clock())
        if missing:
            try:
                self._open(ticket, missing, self._held)
            except BaseException:
                self._let_go(layer, wanted)
                raise
            self._transfer.send(ticket.reads)
        return ticket

    def release(self, ticket: Ticket, waited: int = 0, ended: bool = True) -> None:
        """Give back what was requested, when its kernel has run and waited so many ns. A failed read is raised here.

        ended: False where it will not be used: what is not read yet is not read any more, and nothing is raised.
        """
        if not ended:
            for expert, flight in ticket.flights.items():
                if self._held[ticket.layer * self.experts + expert] == 1:  # nobody else waits for it
                    flight.cancel()
        lost = None
        if ticket.flights:
            try:
                lost = self._close(ticket)
            finally:
                self._let_go(ticket.layer, ticket.wanted)
            self._count(ticket, waited)
        else:
            self._let_go(ticket.layer, ticket.wanted)
        if ended and lost is not None:
            raise lost
        self._used(ticket.layer, ticket.wanted)

    def fits(self, layer: int, wanted: Sequence[int]) -> bool:
        """Whether these may be requested beside what is held."""
        base = layer * self.experts
        more = sum(base + expert not in self._held for expert in wanted)
        return not self._held or len(self._held) + more <= self._room

    def _find(self, layer: int, wanted: Sequence[int]) -> list[int]:
        """Count those in memory, or on their way for somebody else, as hits; the others are returned."""
        run, base, hit, pinned = self._run, layer * self.experts, self._policy.hit, self._pinned
        missing: list[int] = []
        for expert in wanted:
            key = base + expert
            if run[key] < 0:
                missing.append(expert)
            elif key in pinned:
                self.pin_hits += 1
            else:
                hit(key)
        self.hits += len(wanted) - len(missing)
        return missing

    def _open(self, ticket: Ticket, missing: list[int], busy: Container[int]) -> None:
        """Frames for what is missing; `ticket.reads` must begin for it, guesses on their way are taken over."""
        base = ticket.layer * self.experts
        try:
            try:
                for expert in missing:
                    if self.resident >= self._keep:
                        self._evict(busy)
                    self._run[base + expert] = self._fly(ticket, expert).run
                    self.resident += 1
            finally:  # when all that leave have left: a request is one use
                for expert in ticket.flights:
                    self._policy.admit(base + expert)
        except BaseException:
            for flight in ticket.reads:
                flight.cancel()
            self._close(ticket)
            self._count(ticket, 0)
            raise
        if self._guesses:
            self.missed += missing

    def _fly(self, ticket: Ticket, expert: int) -> Flight:
        """The read of one missing expert, from now on told to the page table."""
        flight, hit = self.ahead.take(ticket.layer * self.experts + expert)
        if flight is None or flight.cancel():
            if flight is None and not self.frames.free:
                self.ahead.drop(wait=True)
            run = self.frames.take() if flight is None else flight.run
            flight = self._transfer.read(ticket.layer, expert, run)
            ticket.reads.append(flight)
        else:
            flight.publish()
            ticket.taken.add(expert)
            if hit:
                ticket.guessed.add(expert)
        ticket.flights[expert] = flight
        return flight

    def _close(self, ticket: Ticket) -> BaseException | None:
        """All flights have ended when this returns; an expert that did not arrive is forgotten. The first error."""
        error: BaseException | None = None
        try:
            land(list(ticket.flights.values()))
        finally:
            for expert, flight in ticket.flights.items():
                if flight.error is None and not flight.cancelled:
                    continue
                error = error or flight.error
                key = ticket.layer * self.experts + expert
                self._run[key] = -1
                self.table[ticket.layer, expert] = ABSENT
                self._policy.forget(key)
                self.frames.release(flight.run)
                self.resident -= 1
        return error

    def _count(self, ticket: Ticket, wait: int) -> None:
        """Count what arrived, and the wait for it in ns."""
        for expert, flight in ticket.flights.items():
            if flight.error is not None or flight.cancelled:
                continue
            guessed = expert in ticket.guessed
            self.faults += not guessed
            self.hits += guessed
            if expert in ticket.taken:
                self.ahead.served(flight)
            else:
                self.bytes_read += self.frames.run_bytes
            if self.on_page:
                kind, waited = (PageKind.PREFETCH, 0) if guessed else (PageKind.FAULT, wait)
                self.on_page(ticket.asked_ns, kind, ticket.layer, expert, self.frames.pages, waited, self.step)
        self.wait_ns += wait

    def _used(self, layer: int, wanted: Sequence[int]) -> None:
        if self._pins and self.decode:
            base = layer * self.experts
            for expert in wanted:
                if self._run[base + expert] >= 0 and self._pins.used(base + expert):
                    self._pin(base + expert, True)

    def _let_go(self, layer: int, wanted: Sequence[int]) -> None:
        for expert in wanted:
            key = layer * self.experts + expert
            if self._held[key] == 1:
                del self._held[key]
            else:
                self._held[key] -= 1

    def prefetch(self, layer: int, experts: Iterable[int], most: int | None = None) -> int:
        """Begin to read what may be asked for soon, most wanted first; takes no frame of an expert that was asked for.

        most: experts that are not in memory; the others are not counted. Returns how many there were, at most `most`.
        PagerError for an expert that the model does not have.
        """
        base, absent = layer * self.experts, 0
        for expert in experts:
            if not 0 <= expert < self.experts:
                raise PagerError(f"the prefetcher asked for expert {expert} of layer {layer}: there are {self.experts}")
            if self.above is not None and not self.above.lacking(layer, (expert,)):
                continue
            if self._run[base + expert] >= 0:
                if self.above is not None:
                    self.above.warm(layer, expert)
                continue
            if absent == most:
                break
            if base + expert in self.ahead.flights:
                self.ahead.flights.move_to_end(base + expert)
            elif not self.ahead.issue(base + expert, layer, expert):
                break
            absent += 1
        return absent

    def settle(self, layer: int) -> None:
        """All that the running step needs of this layer is known: guesses at it that are not read yet are cancelled."""
        if self.ahead.flights:
            self.ahead.cancel(range(layer * self.experts, (layer + 1) * self.experts))

    def _moving(self) -> tuple[int, int, int, int]:
        return self.faults, self.hits, self.ahead.all.hits, self.wait_ns

    def counters(self) -> dict[str, int | float]:
        return {
            "faults": self.faults,
            "hits": self.hits,
            "evictions": self.evictions,
            "bytes_read": self.all_bytes,
            "io_wait_s": self.wait_ns / 1e9,
            "frames": self.frames.capacity * self.frames.pages,
            "frames_used": self.resident * self.frames.pages,
            "budget_bytes": self.budget,
            "experts_resident": self.resident,
            "policy_hits": self.hits - self.pin_hits - self.ahead.all.hits,
            "pin_hits": self.pin_hits,
            "pinned": len(self._pins.held) if self._pins else 0,
            "pins": self.pin_events,
            **self.ahead.counters(),
            **self._split.counters(self._moving()),
        }

    def close(self) -> None:
        self.ahead.drain()
        self._transfer.close()
