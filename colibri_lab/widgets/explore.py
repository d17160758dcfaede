"""One plotly figure over the run that is kept, to zoom into: what each token cost, hits and faults, bytes read."""

from __future__ import annotations

import importlib
from typing import Any

from colibri_lab.errors import NotAvailable
from colibri_lab.events import Phase
from colibri_lab.view import palette
from colibri_lab.view.run import RunView
from colibri_lab.view.timeline import STAGES

COLOURS = dict(zip(STAGES, palette.STAGES, strict=True))
# the first would send the figure away; the others mean nothing on bars
REMOVED = ["sendChartToCloud", "select2d", "lasso2d"]


def explore(view: RunView) -> Any:
    """A FigureWidget of the newest 2048 columns. ValueError where nothing ran yet; NotAvailable without plotly."""
    columns = view.timeline.columns
    if not len(columns):
        raise ValueError("nothing to explore: no token was generated yet")
    try:
        graph: Any = importlib.import_module("plotly.graph_objects")
        plots: Any = importlib.import_module("plotly.subplots")
    except ImportError as error:
        raise NotAvailable(f"explore() needs plotly: pip install 'plotly>=7' ({error})") from None
    x = list(range(len(columns)))
    prompt = columns["phase"] == Phase.PREFILL
    words = [
        f"sequence {s}, position {p}{', prompt' if is_prompt else ''}"
        for s, p, is_prompt in zip(columns["sequence"].tolist(), columns["position"].tolist(), prompt, strict=True)
    ]
    titles = ("milliseconds a token, by stage", "experts asked for", "MiB read from disk")
    figure = plots.make_subplots(3, 1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.5, 0.28, 0.22],
                                 subplot_titles=titles)  # fmt: skip

    def bars(row: int, name: str, values: Any, colour: str) -> None:
        told = f"%{{y:.3~f}}<extra>{name}</extra>" if row > 1 else f"%{{y:.3~f}} ms<extra>{name}</extra>"
        figure.add_bar(x=x, y=values.tolist(), name=name, marker_color=colour, marker_line_width=0, row=row, col=1,
                       hovertemplate="%{customdata}<br>" + told, customdata=words)  # fmt: skip

    for i, name in enumerate(STAGES):
        bars(1, name, columns["stages_ns"][:, i] / 1e6, COLOURS[name])
    bars(2, "hits", columns["hits"], palette.OKABE_ITO[2])
    bars(2, "faults", columns["faults"], palette.OKABE_ITO[1])
    bars(3, "read", columns["bytes_read"] / 2**20, palette.OKABE_ITO[5])
    figure.update_layout(barmode="stack", bargap=0, height=620, template="plotly_white", hovermode="closest")
    figure.update_layout(title=view.line(), margin=dict(l=60, r=20, t=80, b=40))
    figure.update_xaxes(title_text=f"the newest {len(columns):,} tokens, oldest first", row=3, col=1)
    widget = graph.FigureWidget(figure)
    widget._config = {**widget._config, "modeBarButtonsToRemove": REMOVED, "displaylogo": False}
    return widget
