"""`engine_mode: async`: a step's rows in groups, each layer of a group a unit that is produced, then consumed.

Produce: attention, router, place, dispatch, and the reads of the experts that are missing begin. Consume: the experts
compute, in the order in which their pages arrive. The next unit is produced before this one is consumed, so the reads
of one group hide behind the attention and the experts of the other; with one group they hide behind the experts that
are there already, and behind what the prefetcher foresaw. Tokens are those of the synchronous step, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns as clock
from traceback import walk_tb
from typing import Any

import numpy as np

from ..dispatch.rings import Rings
from ..dispatch.split import Split
from ..model.transformer import Ahead, Transformer
from ..ops.types import MissingPage
from ..pager.pager import Pager
from ..pager.ticket import Ticket
from .runs import LayerRuns

Waves = Sequence[tuple[int, int, Sequence[int]]]
STAGES = ("embed", "attention", "router", "place", "dispatch", "read", "ahead", "experts")


# the stage of each call that Transformer.forward makes, or a run of layers in its place
CALLS = {
    "begin": "embed",
    "embed": "embed",
    "_attend": "attention",
    "run_layers": "attention",
    "apply": "router",
    "place": "place",
    "chosen": "dispatch",
    "split": "dispatch",
    "acquire": "read",
    "look": "ahead",
    "expert_ffn": "experts",
}


@dataclass(slots=True)
class Unit:
    """One layer of one group of rows, from its attention to its experts."""

    layer: int
    at: int
    n: int
    waves: Waves = ()  # none in a dense layer
    asked: bool = False  # for a single wave; more of them are asked for one by one, as frames become free
    ticket: Ticket | None = None


class Pipeline(Transformer):
    """The forward pass in units. An error leaves with a note of its stage, layer and rows, and nothing in flight."""

    pager: Pager

    def __init__(self, rings: Rings[Unit], split: Split, *parts: Any) -> None:
        super().__init__(*parts)
        self.rings, self._split = rings, split
        self._stage, self._unit, self._since = "embed", Unit(-1, 0, 0), 0
        self.ns = dict.fromkeys(STAGES, 0)  # spent so far; read: asking for pages and waiting for them
        self.reads_hidden = self.reads_arriving = self.frame_stalls = self.full_steps = 0

    def forward(self, n: int, seats: Sequence[int]) -> None:
        """See Transformer.forward."""
        try:
            if self.pager.full:  # nothing is to be read, so nothing would be hidden
                super().forward(n, seats)
                self.full_steps += 1
                return
            if self.whole is not None and self.whole(self, n, seats):
                self.full_steps += self.pager.fits_all
                return
        except BaseException as error:
            error.add_note(_where(error))
            raise
        before, waited, (chose, grouped) = dict(self.ns), self.pager.wait_ns, self.rows.spent.tolist()
        groups = self.rings.deal(n, self._split.pays(n))
        self._unit, self._stage, self._since = Unit(-1, 0, n), "embed", clock()
        try:
            self.kv.begin(seats)
            self.backend.embed(n)
            for layer, sparse in enumerate(self._sparse):
                for at, count in groups:
                    if len(groups) > 1:
                        self._make_room(at, count)
                    self._produce(layer, sparse, at, count)
                if sparse and self._early is not None:
                    self._look(self._early, layer, n)
                if len(groups) == 1:
                    self._consume(n)
            while self.rings:
                self._consume(n)
            self._enter("embed")
        except BaseException as error:
            self._drain(error)
            raise
        spent = {stage: self.ns[stage] - before[stage] for stage in STAGES}
        chosen_ns, grouped_ns = self.rows.spent.tolist()
        chose, grouped = chosen_ns - chose, grouped_ns - grouped  # by the kernels, inside of their stages
        self.attention_ns, self.router_ns = spent["attention"] - chose, spent["router"] + chose
        self.experts_ns, self.io_ns = spent["experts"] - grouped, spent["read"]
        self.dispatch_ns = spent["dispatch"] + spent["place"] + spent["ahead"] + grouped
        self._split.ran(n, len(groups), sum(spent.values()), self.pager.wait_ns - waited)

    def head(self, out_rows: Sequence[int]) -> None:
        """See Transformer.head."""
        try:
            super().head(out_rows)
        except BaseException as error:
            error.add_note("in stage head")
            raise

    def _make_room(self, at: int, n: int) -> None:
        """Consume until these rows have left the layer before, and the producer may go on."""
        while self.rings.holds(at):
            self._consume(n)
        while self.rings.full(n):
            self.rings.stalls += 1
            self._consume(n)

    def _produce(self, layer: int, sparse: bool, at: int, n: int) -> None:
        self._unit = unit = Unit(layer, at, n)
        self._enter("attention")
        reading = self._attend(layer, sparse, n, at)
        self.ns["attention"] -= reading
        self.ns["ahead"] += reading
        if sparse:
            self._enter("router")
            experts, weights, route, gate = self._views.get((at, n)) or self._view(n, at)
            if self._router is not None:
                self._router.apply(layer, n, at)
            chosen = experts.tolist()  # [n][k]
            self._enter("dispatch")
            if n > 1:
                self.pager.chosen(layer, chosen)
            unit.waves = self._dispatch.split(chosen, self.pager.room)
            if len(unit.waves) == 1:
                self._request(unit, unit.waves[0][2])
            self._enter("place")  # behind the reads that have begun
            self.kv.place(layer, [row[0] for row in chosen], at)
            np.copyto(route[layer], experts)
            np.copyto(gate[layer], weights)
        else:
            self._enter("place")
            self.kv.place(layer, [-1] * n, at)
        self.rings.put(unit)
        if self.pressed:
            raise KeyboardInterrupt

    def _request(self, unit: Unit, wanted: Sequence[int]) -> None:
        """Begin to read what is missing; while it does not fit beside what older units hold, they go first."""
        while self.rings and not self.pager.fits(unit.layer, wanted):
            self.frame_stalls += 1
            self._consume(-1)
        self._unit = unit
        self._enter("read")
        unit.ticket, unit.asked = self.pager.request(unit.layer, wanted), True

    def _consume(self, n: int) -> None:
        """The experts of the oldest unit. n: rows of the step."""
        self._unit = unit = self.rings.take()
        for first, last, wanted in unit.waves or ((0, 0, ()),):
            if unit.waves and not unit.asked:
                self._request(unit, wanted)
            if unit.ticket is None:
                self._enter("experts")
                self.backend.expert_ffn(unit.layer, unit.n, first, last, unit.at)
            else:
                self._as_they_arrive(unit, unit.ticket, first, last)
            unit.asked = False
            if self.pressed:
                raise KeyboardInterrupt
        if unit.waves and self._late is not None and unit.at + unit.n == n:
            self._look(self._late, unit.layer, n)

    def _as_they_arrive(self, unit: Unit, ticket: Ticket, first: int, last: int) -> None:
        hidden = sum(flight.landed for flight in ticket.flights.values())
        self.reads_hidden += hidden
        self.reads_arriving += len(ticket.flights) - hidden
        waited = -int(self.pager.arrays.waited[0])
        self._enter("experts")
        try:
            self.backend.expert_ffn(unit.layer, unit.n, first, last, unit.at)
        except MissingPage:
            self._enter("read")
            unit.ticket = None
            self.pager.release(ticket)  # raises what the reader met
            raise
        waited += int(self.pager.arrays.waited[0])
        self._enter("read")
        self.ns["experts"] -= waited  # the kernel's own waiting
        self.ns["read"] += waited
        unit.ticket = None
        self.pager.release(ticket, waited)

    def _look(self, ahead: Ahead, layer: int, n: int) -> None:
        self._enter("ahead")
        ahead.look(layer, self.route[layer, :n].tolist())

    def _enter(self, stage: str) -> None:
        now = clock()
        self.ns[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def _drain(self, error: BaseException) -> None:
        """Nothing is in flight or held any more; the error tells where it happened."""
        unit, stage = self._unit, self._stage
        for held in (unit, *self.rings.clear()):
            if held.ticket is not None:
                ticket, held.ticket = held.ticket, None
                self.pager.release(ticket, ended=False)
        where = "" if unit.layer < 0 else f", layer {unit.layer}, rows {unit.at} to {unit.at + unit.n - 1}"
        error.add_note(f"in stage {stage}{where}")

    def counters(self) -> dict[str, int | float]:
        """Of rings and stages; reads_hidden: had landed before the experts began, reads_arriving: came meanwhile;
        full_steps: nothing was to be read, since all experts of the model were in memory or all those that are asked
        for, so they ran as synchronous ones do."""
        return {
            **self.rings.counters(),
            "full_steps": self.full_steps,
            "frame_stalls": self.frame_stalls,
            "reads_hidden": self.reads_hidden,
            "reads_arriving": self.reads_arriving,
            **{f"{stage}_s": ns / 1e9 for stage, ns in self.ns.items()},
        }


LEADS = {f.__code__ for f in (Transformer.forward, LayerRuns.__call__, LayerRuns.keep_books)}


def _where(error: BaseException) -> str:
    """The stage of a synchronous forward in which this was raised, from its traceback: such steps keep no books."""
    calls = list(walk_tb(error.__traceback__))
    at = max((i for i, (frame, _) in enumerate(calls) if frame.f_code in LEADS), default=-1)
    if at < 0:
        return "in a step that the device does at one go"
    known = calls[at][0].f_locals
    layer = getattr(error, "layer", known.get("layer"))  # of several at one go the error knows which
    stage = CALLS.get(calls[at + 1][0].f_code.co_name, "experts") if at + 1 < len(calls) else "experts"
    return f"in stage {stage}" + ("" if layer is None else f", layer {layer}, rows 0 to {known['n'] - 1}")
