"""A run as one HTML file: the board's panels as SVG, a performance table, settings, model. No kernel, no network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from colibri_lab.events import NO_EXPERT
from colibri_lab.export import write
from colibri_lab.view import palette, svg
from colibri_lab.view.html import Still, duration, grid, number, percent, size, table, words
from colibri_lab.view.run import RunView
from colibri_lab.view.strips import Window
from colibri_lab.view.system_svg import system_panel
from colibri_lab.view.systems import SYSTEMS

_PAGE = "body{margin:0;padding:22px;background:#fff;color-scheme:light dark}"
_PAGE += "@media (prefers-color-scheme:dark){body{background:#111418}}.clr{margin:0 auto}"


class Figure(Still):
    """A picture of a run at one moment that a notebook keeps: readable without a kernel, a widget or a network.

    name: one panel alone (PANELS); None: all of them.
    """

    def __init__(self, view: RunView, name: str | None = None) -> None:
        if name is not None and name not in PANELS:
            raise ValueError(f"no panel is named {name}: there are {', '.join(PANELS)}")
        self.html = figure(view) if name is None else _alone(PANELS[name](view))
        self._words = "<Figure of a run>" if name is None else f"<Figure: {name}>"

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self._words


PANELS: dict[str, Callable[[RunView], str]] = {system.name: partial(system_panel, system=system) for system in SYSTEMS}
PANELS |= {"experts": svg.experts_panel, "time": svg.time_panel, "kv": svg.slots_panel, "latency": svg.latency_panel}
PANELS["text"] = lambda view: prose_panel(view)


def _alone(panel: str) -> str:
    return f"<div class='clr'><style>{svg.STYLE}</style>{panel}</div>"


def figure(view: RunView) -> str:
    """The panels as one HTML fragment with its own style, for a notebook output."""
    return _alone(_panels(view))


def report(source: Any, path: str | os.PathLike[str], counters: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Writes the report and returns its path. source: a RunView, a Telemetry, a ReplaySource, or an engine.

    OSError names `path` where it cannot be written.
    """
    view = as_view(source)
    if counters is None and hasattr(source, "describe"):
        counters = source.counters()
    return write(path, page(view, counters or {}).encode())


def as_view(source: Any) -> RunView:
    """A RunView of whatever holds a run's events."""
    if isinstance(source, RunView):
        return source
    if hasattr(source, "telemetry"):
        return RunView.of(source.telemetry, source.describe())
    return RunView.of(source)


def page(view: RunView, counters: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole HTML document."""
    about = view.about
    name, family = view.name, f"{about['family']}, " if about.get("family") else ""
    first = f"{family}{view.layers} layers of {view.n_experts} experts, top-{view.top_k}".lstrip(", ")
    head = f"<h1>{escape(name)}</h1><p class='under'>{escape(first)} · Colibri Lab report</p>"
    cards = [card("Performance", table(performance(view))), card("Model and settings", table(model_facts(about)))]
    body = head + _panels(view) + f"<div class='two'>{''.join(cards)}</div>"
    body += card("Busiest experts", grid(("layer, expert", "share", "faults", "in memory"), busiest(view)))
    if counters:
        flat = {f"{group}.{key}": value for group, values in counters.items() for key, value in values.items()}
        body += f"<details class='card'><summary>All counters</summary>{table(flat)}</details>"
    return document(f"{name}: Colibri Lab report", body)


def document(title: str, body: str) -> str:
    """A page that stands alone around an HTML fragment."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{svg.STYLE}{_PAGE}</style></head>"
        f"<body><main class='clr'>{body}</main></body></html>\n"
    )


def card(title: str, body: str) -> str:
    """A box with a heading."""
    head = f"<div class='head' role='heading' aria-level='3'><b>{escape(title)}</b></div>"
    return f"<section class='card'>{head}{body}</section>"


def _panels(view: RunView) -> str:
    pair = f"<div class='two'>{svg.latency_panel(view)}{svg.slots_panel(view)}</div>"
    on = Window(view.gauges).on
    shown = [system for system, is_on in zip(SYSTEMS, on, strict=True) if is_on or not system.special]
    systems = "".join(system_panel(view, system) for system in shown)
    return tiles(view) + svg.experts_panel(view) + svg.time_panel(view) + pair + prose_panel(view) + systems


def tiles(view: RunView) -> str:
    time, latency = view.timeline, view.timeline.latency()
    shown = [
        ("tokens/s, last 2 s", number(time.tokens_per_s() or None), f"{latency.n:,} tokens"),
        ("ms a token P50 · P95 · P99", number(latency.p50 or None), f"{number(latency.p95)} · {number(latency.p99)}"),
        ("time to first token", duration(time.first_token_ms()), f"prompt {words(time.prompt_tokens)}"),
        ("expert hits", percent(time.hit_rate()), f"{time.faults:,} faults"),
        ("experts in memory", size(view.resident_bytes), f"of {size(view.budget_bytes)}"),
        ("KV slots, peak", f"{view.slots.peak:,}", f"of {len(view.slots.sequence):,}"),
    ]
    boxes = "".join(
        f"<div class='tile'><small>{escape(name)}</small><b>{escape(big)}</b> <span>{escape(more)}</span></div>"
        for name, big, more in shown
    )
    return f"<div class='tiles'>{boxes}</div>"


def prose_panel(view: RunView) -> str:
    pieces, layer = view.prose.after(-1), min(view.layers - 1, round(view.layers * 0.6))
    if not pieces.text:
        return ""
    first = pieces.route[:, layer, 0].tolist()
    spans = [f"<em>{escape(view.prompt)}</em>"]
    for text, expert in zip(pieces.text, first, strict=True):
        tint = "" if expert == NO_EXPERT else f" style='background:{palette.OKABE_ITO[expert % 8]}3a'"
        spans.append(f"<s{tint}>{escape(text)}</s>")
    known = [e for e in first if e != NO_EXPERT]
    top = sorted(set(known), key=lambda e: (-known.count(e), e))[:6]
    keys = [(f"expert {e}: {known.count(e)}", palette.OKABE_ITO[e % 8] + "8c") for e in top]
    return svg.panel("Text", f"tint: first expert of layer {layer}", f"<div class='prose'>{''.join(spans)}</div>", keys)


def performance(view: RunView) -> dict[str, object]:
    """The figures of a run by name, as the report's table shows them."""
    time, latency = view.timeline, view.timeline.latency()
    prompt_rate = time.prompt_rows / (time.prompt_ns / 1e9) if time.prompt_ns else None
    share = [f"{name} {percent(part)}" for name, part in time.shares().items()]
    return {
        "tokens decoded": latency.n,
        "ms a token P50 · P95 · P99": f"{number(latency.p50)} · {number(latency.p95)} · {number(latency.p99)}",
        "longest token": duration(latency.longest),
        "time to first token": duration(time.first_token_ms()),
        "prompt tokens/s": prompt_rate,
        "expert hits": f"{time.hits:,} ({percent(time.hit_rate())})",
        "expert faults, evicted": f"{time.faults:,}, {time.evictions:,}",
        "most faults": _worst(view),
        "bytes read": size(time.bytes_read),
        "where the time went": ", ".join(share) or None,
        "events missed by this view": view.missing,
    }


def _worst(view: RunView) -> str | None:
    faults = view.experts.faults.sum(axis=1)
    if not faults.any():
        return None
    return f"layer {faults.argmax()}: {faults.max():,} ({percent(float(faults.max() / faults.sum()))})"


def model_facts(about: Mapping[str, Any]) -> dict[str, object]:
    shown = {key: value for key, value in about.items() if key not in ("model", "path")}
    return {key.replace("_bytes", "").replace("_", " "): size(v) if "_bytes" in key else v for key, v in shown.items()}


def busiest(view: RunView, most: int = 8) -> list[tuple[object, ...]]:
    share = view.experts.share
    order = share.ravel().argsort(kind="stable")[::-1][:most].tolist()
    spots = [divmod(i, max(view.n_experts, 1)) for i in order]
    faults, resident = view.experts.faults, view.experts.resident
    return [
        (f"layer {m}, expert {e}", percent(float(share[m, e])), int(faults[m, e]), bool(resident[m, e]))
        for m, e in spots
    ]
