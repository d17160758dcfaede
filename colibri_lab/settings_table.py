"""Settings as a table for notebooks: what was chosen is bold."""

from __future__ import annotations

from html import escape
from typing import Any


def settings_table(config: Any) -> str:
    """HTML of a Config: key, value, unit, whether a running engine takes it, what it does."""
    rows = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        shown = escape("" if value is None else str(value))
        if name in config.model_fields_set and value != field.default:
            shown = f"<b>{shown}</b>"
        live = "live" if config.fact(name, "live") else ""
        cells = (name, shown, escape(str(config.fact(name, "unit"))), live, escape(field.description or ""))
        rows.append("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>")
    head = "".join(f"<th>{h}</th>" for h in ("key", "value", "unit", "", "what it does"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
