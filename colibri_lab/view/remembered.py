"""The state of a view as events of one moment, so that a trace may begin in the middle of a run."""

from __future__ import annotations

import numpy as np

from colibri_lab.events import SEQUENCE, SLOT, SequenceKind, SlotKind
from colibri_lab.streams import nothing
from colibri_lab.trace import Batch
from colibri_lab.view.run import RunView

_SLOTS = 8192  # of a snapshot: a line of a trace has its limit


def remembered(view: RunView, t_ns: int) -> Batch:
    """A snapshot of experts and slots, pairs of slots, the running sequences, the text that is shown, notes."""
    pool, experts = view.slots, view.experts
    used = np.flatnonzero(~pool.free)
    rows = np.stack([used, pool.sequence[used], pool.layer[used], pool.owner[used], pool.fill[used]], axis=1).tolist()
    states = {"resident": experts.resident, "pinned": experts.pinned, "ahead": experts.ahead & experts.resident}
    if experts.device.any():
        states["device"] = experts.device
    memory = {name: np.flatnonzero(state).tolist() for name, state in states.items()}
    told = [{"slots": rows[at : at + _SLOTS]} for at in range(0, max(len(rows), 1), _SLOTS)]
    told[0] = {**memory, **told[0]}
    when = {key: t for key, _, t in view.notes}
    known = Batch(**nothing(view.layers, view.top_k), names=view.gauges.names)
    known.notes = [(key, value, when.get(key, 0)) for key, value in view.facts.items() if key != "snapshot"]
    known.notes += [("snapshot", value, t_ns) for value in told]
    known.slots = np.array([(t_ns, SlotKind.PAIR, *row[:4]) for row in rows if pool.double[row[0]]], SLOT)
    running = [(t, SequenceKind.START, s, prompt, 0) for s, (t, prompt) in view.timeline.running.items()]
    known.sequences = np.array(sorted(running), SEQUENCE)
    pieces = view.prose.after(-1)
    known.texts = [(view.prose.sequence, at, text) for at, text in zip(pieces.position, pieces.text, strict=True)]
    return known
