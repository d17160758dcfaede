"""What the panels of the systems show, as data: which counters, how they are drawn, what is said of them in words.

Board and report draw the same descriptions (strips.py turns counters into columns), so a new counter is one line here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from colibri_lab.view import palette

BLUE, ORANGE, GREEN, PINK, SKY, RED, _, GREY = palette.OKABE_ITO


class Line(NamedTuple):
    """One series: the growth of the counters `of` in a column (or their level), over that of `over` where there is one.

    over: "seconds" makes it a rate. draw: stack (one above the other in its lane), line or dashes.
    """

    label: str
    lane: int
    colour: str
    of: tuple[str, ...]
    over: tuple[str, ...] = ()
    draw: str = "stack"
    level: bool = False


class Lane(NamedTuple):
    """A scale of its own. unit: share (of 1), permille, bytes/s, s/s (seconds a second) or none; whole: whole numbers;
    top: where the scale ends, 0 for the largest value."""

    title: str
    unit: str = ""
    whole: bool = False
    top: float = 0


class Fact(NamedTuple):
    """A figure of the run. kind: count, bytes, seconds, each with its share of `over` where there is one, or ratio."""

    label: str
    kind: str
    of: tuple[str, ...]
    over: tuple[str, ...] = ()


class System(NamedTuple):
    """A panel. lanes: from top to bottom; one without any value is left out. The panel is off while all of `on` are
    absent or 0, and `off` says how to turn it on. notes: the key of notes that are marked on it. special: few machines
    have it, so it is not among the others where it is off."""

    name: str
    title: str
    lanes: tuple[Lane, ...]
    lines: tuple[Line, ...]
    facts: tuple[Fact, ...]
    on: tuple[str, ...]
    off: str
    notes: str = ""
    special: bool = False


def _of(system: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{system}.{name}" for name in names)


ASKED = _of("pager", "hits", "faults")
PAGES = System(
    "pages",
    "Pages",
    (Lane("experts asked for", whole=True), Lane("read ahead", whole=True), Lane("read", "bytes/s")),
    (
        Line("policy hits", 0, GREEN, _of("pager", "policy_hits")),
        Line("pin hits", 0, BLUE, _of("pager", "pin_hits")),
        Line("prefetch hits", 0, SKY, _of("pager", "prefetch_hits")),
        Line("faults", 0, ORANGE, _of("pager", "faults")),
        Line("useful", 1, SKY, _of("pager", "prefetch_hits")),
        Line("late", 1, PINK, _of("pager", "prefetch_late")),
        Line("wasted", 1, GREY, _of("pager", "prefetch_wasted")),
        Line("bytes/s", 2, RED, _of("pager", "bytes_read"), ("seconds",), "line"),
    ),
    (
        Fact("policy hits", "count", _of("pager", "policy_hits"), ASKED),
        Fact("pin hits", "count", _of("pager", "pin_hits"), ASKED),
        Fact("prefetch hits", "count", _of("pager", "prefetch_hits"), ASKED),
        Fact("faults", "count", _of("pager", "faults"), ASKED),
        Fact("pinned now", "count", _of("pager", "pinned")),
        Fact("guesses too late", "count", _of("pager", "prefetch_late"), _of("pager", "prefetch_issued")),
        Fact("guesses wasted", "count", _of("pager", "prefetch_wasted"), _of("pager", "prefetch_issued")),
        Fact("begun by two_stage, useful", "count", _of("pager", "early_useful"), _of("pager", "early_issued")),
        Fact("read from disk", "bytes", _of("pager", "bytes_read")),
        Fact("waited for pages", "seconds", _of("pager", "io_wait_s")),
    ),
    ASKED,
    "no expert was asked for yet",
    "settings",
)
ROWS = _of("router", "selections")
ROUTER = System(
    "router",
    "Router",
    (Lane("rows decided", "share", top=1), Lane("candidates a row"), Lane("wrong, of rows audited", "share")),
    (
        Line("by certificate", 0, BLUE, _of("router", "certified"), ROWS),
        Line("in full", 0, ORANGE, _of("router", "fallback"), ROWS),
        Line("candidates", 1, GREEN, _of("router", "candidates"), _of("router", "certified"), "line"),
        Line("wrong", 2, RED, _of("router", "wrong_selections"), _of("router", "audited"), "line"),
    ),
    (
        Fact("rows routed", "count", ROWS),
        Fact("by certificate", "count", _of("router", "certified"), ROWS),
        Fact("in full", "count", _of("router", "fallback"), ROWS),
        Fact("candidates a row", "ratio", _of("router", "candidates"), _of("router", "certified")),
        Fact("wrong selections", "count", _of("router", "wrong_selections"), _of("router", "audited")),
    ),
    _of("router", "certified", "fallback", "audited"),
    "this router scores every expert in full; router: two_stage has certificates, router_audit counts wrong selections",
)
DISPATCH = System(
    "dispatch",
    "Dispatch",
    (Lane("ring fill", "share", top=1), Lane("stalls", whole=True), Lane("reads", whole=True), Lane("wait", "s/s")),
    (
        Line("ring A", 0, BLUE, _of("dispatch", "ring_a_filled"), _of("dispatch", "ring_a_units"), "line"),
        Line("ring B", 0, ORANGE, _of("dispatch", "ring_b_filled"), _of("dispatch", "ring_b_units"), "dashes"),
        Line("watermark", 0, GREY, _of("dispatch", "watermark"), (), "line", True),
        Line("rings full", 1, PINK, _of("dispatch", "stalls")),
        Line("no frame free", 1, GREY, _of("dispatch", "frame_stalls")),
        Line("there when needed", 2, GREEN, _of("dispatch", "reads_hidden")),
        Line("still arriving", 2, ORANGE, _of("dispatch", "reads_arriving")),
        Line("waited for pages", 3, RED, _of("pager", "io_wait_s"), ("seconds",), "line"),
    ),
    (
        Fact("rows to experts", "count", _of("dispatch", "rows")),
        Fact("waves", "count", _of("dispatch", "waves")),
        Fact("bytes copied", "bytes", _of("dispatch", "bytes_copied")),
        Fact("units through the rings", "count", _of("dispatch", "units")),
        Fact("moves to the other ring", "count", _of("dispatch", "ring_switches")),
        Fact("stalls, rings full", "count", _of("dispatch", "stalls")),
        Fact("stalls, no frame free", "count", _of("dispatch", "frame_stalls")),
        Fact(
            "reads hidden", "count", _of("dispatch", "reads_hidden"), _of("dispatch", "reads_hidden", "reads_arriving")
        ),
        Fact("waited for pages", "seconds", _of("pager", "io_wait_s")),
    ),
    _of("dispatch", "units"),
    "engine_mode: sync runs one stage after the other, without rings",
)
BATCH = System(
    "batch",
    "Batch",
    (Lane("requests", whole=True), Lane("rows a step"), Lane("memory in use, processor idle", "permille", top=1000)),
    (
        Line("running", 0, BLUE, _of("engine", "running"), (), "stack", True),
        Line("waiting", 0, GREY, _of("engine", "waiting"), (), "stack", True),
        Line("at most", 0, RED, _of("batch", "cap"), (), "line", True),
        Line("rows", 1, GREEN, _of("engine", "prefill_tokens", "decode_tokens"), _of("engine", "steps"), "line"),
        Line("memory", 2, PINK, _of("batch", "memory_permille"), (), "line", True),
        Line("idle", 2, SKY, _of("batch", "idle_permille"), (), "dashes", True),
    ),
    (
        Fact("running now", "count", _of("engine", "running")),
        Fact("waiting", "count", _of("engine", "waiting")),
        Fact("at most", "count", _of("batch", "cap")),
        Fact("rows a step", "ratio", _of("engine", "prefill_tokens", "decode_tokens"), _of("engine", "steps")),
        Fact("halved", "count", _of("batch", "halvings")),
        Fact("grown by one", "count", _of("batch", "growths")),
        Fact("held back, over all steps", "count", _of("batch", "held")),
    ),
    _of("engine", "steps"),
    "no request ran yet",
    "batch",
)
EXACT = _of("kv", "attention_bytes_exact")
CACHE = System(
    "cache",
    "KV cache",
    (Lane("slots", whole=True), Lane("attention reads", "bytes/s"), Lane("tokens restored", whole=True)),
    (
        Line("in use", 0, BLUE, _of("kv", "slots_used"), (), "stack", True),
        Line("in a file", 0, RED, _of("persistence", "slots_spilled"), (), "line", True),
        Line("read", 1, GREEN, _of("kv", "attention_bytes"), ("seconds",), "line"),
        Line("exact attention", 1, GREY, EXACT, ("seconds",), "dashes"),
        Line("restored", 2, SKY, _of("persistence", "tokens_restored")),
    ),
    (
        Fact("slots in use", "count", _of("kv", "slots_used"), _of("kv", "slots")),
        Fact("most in use", "count", _of("kv", "slots_peak"), _of("kv", "slots")),
        Fact("tokens a slot", "count", _of("kv", "slot_size")),
        Fact("slots taken in pairs", "count", _of("kv", "double_slots")),
        Fact("base slots taken", "count", _of("kv", "base_slots")),
        Fact("places exchanged", "count", _of("kv", "promotions")),
        Fact("attention reads, of exact", "bytes", _of("kv", "attention_bytes"), EXACT),
        Fact("slots in a file", "count", _of("persistence", "slots_spilled")),
        Fact("prefixes stored", "count", _of("persistence", "prefixes_stored")),
        Fact("prefixes restored", "count", _of("persistence", "prefixes_restored")),
    ),
    _of("kv", "slots_peak"),
    "no token has keys and values yet",
)
GRAPHS = _of("gpu", "graph_replays", "graphs_captured")
ALONE = tuple(f"gpu.steps_without_graph_{why}" for why in ("prompt", "batch", "experts", "settings"))
PICKS = _of("gpu", "picks_gpu", "picks_cpu")
GPU = System(
    "gpu",
    "GPU",
    (Lane("experts asked for", whole=True), Lane("computed", whole=True), Lane("sent", "bytes/s"),
     Lane("steps", whole=True)),
    (
        Line("on the GPU", 0, GREEN, _of("gpu", "experts_hits")),
        Line("sent for", 0, ORANGE, _of("gpu", "experts_faults")),
        Line("by the GPU", 1, BLUE, _of("gpu", "picks_gpu")),
        Line("by the processor", 1, GREY, _of("gpu", "picks_cpu")),
        Line("bytes/s", 2, RED, _of("gpu", "sent_bytes"), ("seconds",), "line"),
        Line("as a graph", 3, SKY, GRAPHS),
        Line("layer by layer", 3, PINK, ALONE),
    ),
    (
        Fact("experts on the GPU now", "count", _of("gpu", "experts_resident")),
        Fact("computed by the GPU", "count", _of("gpu", "picks_gpu"), PICKS),
        Fact("sent because asked for", "count", _of("gpu", "experts_faults")),
        Fact("sent ahead", "count", _of("gpu", "experts_ahead")),
        Fact("sent to the GPU", "bytes", _of("gpu", "sent_bytes")),
        Fact("read from it", "bytes", _of("gpu", "read_bytes")),
        Fact("waits for a transfer", "count", _of("gpu", "send_waits"), _of("gpu", "sends")),
        Fact("steps as a graph", "count", GRAPHS, GRAPHS + ALONE),
        Fact("tokens chosen there", "count", _of("gpu", "tokens_chosen")),
    ),
    _of("gpu", "device_bytes"),
    "the processor computes here; backend: cuda takes a GPU",
    special=True,
)  # fmt: skip
SYSTEMS = (PAGES, ROUTER, CACHE, DISPATCH, GPU, BATCH)


def described() -> list[dict[str, Any]]:
    """The panels for the board, which draws them from this."""
    return [
        {
            "name": system.name,
            "title": system.title,
            "lanes": [{"title": lane.title, "unit": lane.unit, "whole": lane.whole} for lane in system.lanes],
            "lines": [
                {"label": line.label, "lane": line.lane, "colour": line.colour, "draw": line.draw}
                for line in system.lines
            ],
            "facts": [[fact.label, fact.kind] for fact in system.facts],
            "off": system.off,
            "special": system.special,
        }
        for system in SYSTEMS
    ]
