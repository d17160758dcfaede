"""The tuner: every live setting as a control, from the config's own schema, and what needs a new engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from colibri_lab.config import Config
from colibri_lab.pager.policies import policy_name
from colibri_lab.view.html import Still, grid, size

HEARD = 16  # marks that are told back: more than pages send between two pictures


class Tuner(Still):
    """Shows engine.settings and writes them; `wrong` holds, by key, what the engine said of a value that it refused."""

    def __init__(self, settings: Any, about: Mapping[str, Any], write: Callable[[str, Any], None]) -> None:
        """about: engine.describe(), for the range of the expert budget; write(key, value): how a setting is written."""
        self._settings, self._about, self._write = settings, about, write
        self._schema: dict[str, dict[str, Any]] = Config.model_json_schema()["properties"]
        self._live = [name for name, facts in self._schema.items() if facts["live"]]
        self._told: tuple[tuple[int | None, Config | None], dict[str, str]] = ((None, None), {})
        self.wrong: dict[str, str] = {}
        self.heard: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        """For the board, once: live keys with unit, default, range, options and help; the others with their values."""
        live = [self._field(name, self._schema[name]) for name in self._live]
        return {"live": live, "fixed": [(name, self._now(name), help) for name, help in self._fixed()]}

    def values(self, budget: int | None = None) -> dict[str, str]:
        """Live settings as written, in words. budget: bytes for experts in force, where the setting is none."""
        now = (budget, self._settings.config)
        if now[0] != self._told[0][0] or now[1] is not self._told[0][1]:  # asked for with every picture; seldom changes
            told = {name: self._now(name) for name in self._live}
            if budget is not None:
                told["expert_cache_bytes"] = size(budget)
            self._told = now, told
        return self._told[1]

    def write(self, name: str, text: str, mark: str = "") -> None:
        """Takes over what a person typed or chose; empty or none is no value. Refused values go to `wrong`.

        mark: what a page calls this message by; it is told back in `heard`, so that the page knows which values are
        older than its own.
        """
        said = ""
        try:
            self._write(name, self._parsed(name, text.strip()))
        except (ValueError, RuntimeError, OSError) as error:  # the engine's kinds, closed and without room too
            said = str(error)
        others = {key: told for key, told in self.wrong.items() if key != name}
        self.wrong = others | ({name: said} if said else {})
        if mark:
            self.heard = (*self.heard, mark[:16])[-HEARD:]

    def told(self, budget: int | None) -> dict[str, Any]:
        """For the board, with each picture. `heard` is looked at first: values may only be newer."""
        heard = self.heard
        return {"heard": heard, "wrong": self.wrong, "values": self.values(budget)}

    def _parsed(self, name: str, text: str) -> Any:
        facts = self._schema.get(name, {})
        kinds = {facts.get("type"), *(kind.get("type") for kind in facts.get("anyOf", ()))}
        if text in ("", "none", "off") and "null" in kinds:
            return None
        for kind, make in (("integer", int), ("number", float)):
            if kind in kinds:
                try:
                    return make(text.replace(",", ""))
                except ValueError:
                    return text  # "4 MiB", or the engine says what is wrong with it
        return text

    def _field(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        numbers = next((kind for kind in facts.get("anyOf", ()) if kind.get("type") != "null"), facts)
        low, high = numbers.get("minimum", numbers.get("exclusiveMinimum")), numbers.get("maximum")
        between = f"{low:,} to {high:,}" if high is not None else f"from {low:,}" if low is not None else ""
        if "exclusiveMinimum" in numbers:
            between = f"above {low:,}" + (f", at most {high:,.0f}" if high is not None else "")
        if name == "expert_cache_bytes":
            least, most = (self._about.get(key) for key in ("expert_cache_least_bytes", "experts_total_bytes"))
            between = f"{size(least)} to {size(most)}" if least else f"up to {size(most)}"
        return {
            "name": name,
            "label": name.removesuffix("_bytes").removesuffix("_ms").replace("_", " "),
            "unit": facts["unit"],
            "default": _word(facts["default"]),
            "range": between,
            "options": facts.get("options", []),
            "help": facts["description"],
        }

    def _fixed(self) -> list[tuple[str, str]]:
        return [(name, facts["description"]) for name, facts in self._schema.items() if not facts["live"]]

    def _now(self, name: str) -> str:
        value = getattr(self._settings, name, self._schema[name]["default"])
        if name.endswith("_bytes") and isinstance(value, int) and not isinstance(value, bool):
            return size(value)
        return _word(value)

    def __repr__(self) -> str:
        return f"<tuner: {', '.join(f'{name} {value}' for name, value in self.values().items())}>"

    def _repr_html_(self) -> str:
        live = self.described()["live"]
        rows = [
            (f["name"], self._now(f["name"]), f["unit"], f["default"], f["range"] or ", ".join(f["options"]))
            for f in live
        ]
        fixed = [(name, self._now(name), help) for name, help in self._fixed()]
        head = grid(("live setting", "now", "unit", "default", "range"), rows)
        needs = "set when an engine is loaded: <code>colibri_lab.load(path, key=value)</code>"
        return f"{head}<p>{needs}</p>{grid(('setting', 'now', 'what it does'), fixed)}"


def _word(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return "none" if value is None else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else policy_name(value)
