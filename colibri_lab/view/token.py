"""One token: its route through the layers, what it was chosen from, what its step cost and waited for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from math import exp, isfinite
from typing import Any

import numpy as np

from colibri_lab.events import NO_EXPERT, PageKind
from colibri_lab.streams import Streams
from colibri_lab.view import palette, svg
from colibri_lab.view.html import grid, percent
from colibri_lab.view.html import number as three_digits
from colibri_lab.view.timeline import STAGES, stages

READ, AHEAD = "read", "read ahead"


@dataclass(frozen=True)
class TokenDetail:
    """One sampled token. Times in milliseconds: of its step (latency_ms), and its row's share of each stage.

    experts, weights: of each layer, best first, none in a dense layer; reads: what its step did for each of them:
    "" (it was in memory), "read" (a fault) or "read ahead" (guessed for it or a later layer). slots: the KV slot of
    each layer. rows, faults, hits, evictions, bytes_read: of the whole step, whose rows share it. probability, best:
    (text, probability) under the model's own distribution, None and empty unless telemetry_top_logprobs was on.
    """

    number: int
    sequence: int
    position: int
    id: int
    text: str
    latency_ms: float
    rows: int
    stages_ms: dict[str, float]
    faults: int
    hits: int
    evictions: int
    bytes_read: int
    experts: list[list[int]]
    weights: list[list[float]]
    reads: list[list[str]]
    slots: list[int]
    probability: float | None
    best: list[tuple[str, float]]

    @classmethod
    def of(cls, run: Streams, place: int, number: int) -> TokenDetail:
        """The place-th sampled token of what is kept; `number` is its own."""
        rows = run["tokens"]
        at = int(np.flatnonzero(rows["token"] >= 0)[place])
        row, sequence, position = rows[at], int(rows[at]["sequence"]), int(rows[at]["position"]) + 1
        step = rows[rows["t_ns"] == row["t_ns"]]
        sums = {name: int(step[name].sum(dtype="u8")) for name in ("faults", "hits", "evictions", "bytes_read")}
        experts = [[e for e in layer if e != NO_EXPERT] for layer in run["route"][at].tolist()]
        weights = run["weight"][at].astype("f8").tolist()
        said = [text for s, p, text in run["texts"] if (s, p) == (sequence, position)]
        odds = [(of, best) for s, p, of, best in run["logprobs"] if (s, p) == (sequence, position)]
        return cls(
            number=number,
            sequence=sequence,
            position=position,
            id=int(row["token"]),
            text="".join(said) or (odds[0][0][1] if odds else ""),
            latency_ms=int(row["latency_ns"]) / 1e6,
            rows=int(row["rows"]),
            stages_ms=dict(zip(STAGES, (stages(rows[at : at + 1])[0] / 1e6).tolist(), strict=True)),
            **sums,
            experts=experts,
            weights=[w[: len(e)] for w, e in zip(weights, experts, strict=True)],
            reads=_reads(run, int(row["t_ns"]), experts),
            slots=run["slot"][at].tolist(),
            probability=exp(odds[0][0][2]) if odds else None,
            best=[(text, exp(logprob)) for _, text, logprob in odds[0][1]] if odds else [],
        )

    def told(self) -> dict[str, Any]:
        """All of it as strict JSON; a weight that is not finite is None."""
        plain = [[w if isfinite(w) else None for w in layer] for layer in self.weights]
        return asdict(self) | {"weights": plain}

    def __repr__(self) -> str:
        odds = "" if self.probability is None else f", probability {self.probability:.3g}"
        return f"<token {self.number} {self.text!r}: {three_digits(self.latency_ms)} ms, {self.faults} faults{odds}>"

    def _repr_html_(self) -> str:
        layers = [
            f"<tr><th scope='row'>layer {layer}</th>{''.join(map(_cell, *picks))}</tr>"
            for layer, picks in enumerate(zip(self.experts, self.weights, self.reads, strict=True))
        ]
        route = f"<table><tbody>{''.join(layers)}</tbody></table>"
        among = [(self.text, self.probability)] if self.probability not in (None, *(p for _, p in self.best)) else []
        chosen = (self.text, self.probability)
        odds = [(f"{one[0]!r}{', chosen' if one == chosen else ''}", percent(one[1])) for one in [*self.best, *among]]
        times = [(name, f"{three_digits(ms)} ms") for name, ms in self.stages_ms.items() if ms]
        rows = f"{self.rows} row" + "s" * (self.rows != 1)
        facts = [("its step", f"{three_digits(self.latency_ms)} ms, {rows}"), *times]
        facts += [("faults, hits, evicted", f"{self.faults}, {self.hits}, {self.evictions}")]
        tables = route + grid(("chosen from", "share"), odds) * bool(odds) + grid(("where its time went", ""), facts)
        sub = f"number {self.number}, position {self.position} of request {self.sequence}"
        keys = [("read for it", palette.FAULT), ("read ahead", palette.HIT)]
        title = f"Token {self.text!r}"
        return f"<div class='clr'><style>{svg.STYLE}</style>{svg.panel(title, sub, tables, keys)}</div>"


def _cell(expert: int, weight: float, read: str) -> str:
    colour = {READ: palette.FAULT, AHEAD: palette.HIT}.get(read, "transparent")
    return f"<td style='border-left:4px solid {colour}'>expert {expert} · {three_digits(weight)} {escape(read)}</td>"


def _reads(run: Streams, t_ns: int, experts: list[list[int]]) -> list[list[str]]:
    """Pages events from the end of the step before to the end of this one, for each expert of the route."""
    ends, pages = run["tokens"]["t_ns"], run["pages"]
    before = int(ends[ends < t_ns].max(initial=0))
    mine = pages[(pages["t_ns"] > before) & (pages["t_ns"] <= t_ns)]
    found: dict[tuple[int, int], str] = {}
    for kind, words in ((PageKind.PREFETCH, AHEAD), (PageKind.FAULT, READ)):
        for page in mine[mine["kind"] == kind][["layer", "expert"]].tolist():
            found[page] = words
    return [[found.get((layer, expert), "") for expert in chosen] for layer, chosen in enumerate(experts)]
