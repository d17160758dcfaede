"""What all benchmark commands share: their app, --json and --html, and the exit codes.

Exit codes: 0 done, 2 wrong input or a missing peer, 3 the machine was too noisy for the figures to be trusted.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from colibri_lab.bench.peer import PeerError
from colibri_lab.bench.result import Result

app = typer.Typer(
    help="Measure the engine beside its limits and its peers.", no_args_is_help=True, pretty_exceptions_enable=False
)
VALIDATION = Path(__file__).resolve().parents[2] / "data" / "validation"  # in a checkout

Json = Annotated[bool, typer.Option("--json", help="end with one JSON line instead of a table")]
Html = Annotated[Path | None, typer.Option(help="write tables and pictures into this file")]
ShapeName = Annotated[str, typer.Option(help="random weights of this shape: nano, m0, m1, m2 (2 GB)")]
AnyModel = Annotated[str, typer.Option(help="embedded, or random weights: nano, m0, m1, m2 (2 GB)")]
Threads = Annotated[int, typer.Option(min=1, help="compute threads")]
Texts = Annotated[Path, typer.Option(help="folder of texts for the embedded model, one .txt for each domain")]
PeerName = Annotated[str, typer.Option(help="run beside: llama.cpp, transformers (where the command takes it)")]
PeerPython = Annotated[
    str | None, typer.Option(help="interpreter that has the peer; default COLIBRI_PEER_PYTHON, else this one")
]


def benchmark(name: str) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """`colibri-lab bench NAME`: the function's options and help, with --json and --html added; it returns a Result."""

    def add(measure: Callable[..., Result]) -> Callable[..., None]:
        hints = get_type_hints(measure, include_extras=True)
        shared = {"html": (Html, None), "json": (Json, False)}

        def command(json: bool, html: Path | None, **options: Any) -> None:
            finish(name, lambda: measure(**options), json, html)

        own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(measure).parameters.values()]
        more = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for key, (kind, default) in shared.items()
        ]
        command.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
        command.__doc__ = measure.__doc__
        app.command(name)(command)
        return command

    return add


def finish(name: str, measure: Callable[[], Result], as_json: bool, html: Path | None = None) -> None:
    """Run, print, draw, and leave with the exit code that the result asks for."""
    from colibri_lab.paths import file_to_write

    begin = time.perf_counter()
    try:
        if html is not None:
            file_to_write(html)  # before minutes of work
        result = measure()
    except (PeerError, ValueError) as error:
        typer.echo(f"colibri-lab: error: {error}", err=True)
        raise typer.Exit(2) from None
    if html is not None:
        draw(name, result, time.perf_counter() - begin, html)
    if as_json:
        typer.echo(result.to_json())
    else:
        result.show()
    raise typer.Exit(result.exit_code)


def draw(name: str, result: Result, seconds: float, html: Path) -> None:
    """The page of one benchmark."""
    import json

    from colibri_lab.bench.page import page
    from colibri_lab.bench.suite import Part
    from colibri_lab.export import write

    part = Part(name, (), result.exit_code, seconds, json.loads(result.to_json()))
    write(html, page([part], f"colibri-lab bench {name}").encode())


def numbers(option: str, given: str) -> list[int]:
    """Whole numbers by commas; ValueError names the option."""
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"--{option} {given!r}: whole numbers by commas, as 25,50,75") from None
