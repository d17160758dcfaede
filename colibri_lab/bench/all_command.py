"""`colibri-lab bench all`: all the others in turn. With it `app` is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colibri_lab.bench.command import Json, PeerPython
from colibri_lab.bench.speed_commands import app

__all__ = ["app"]
NAMES = tuple(str(command.name) for command in app.registered_commands)


@app.command("all")
def all_command(
    only: Annotated[str, typer.Option(help=f"by commas, of {', '.join(NAMES)}; all")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="small shapes and few rounds: a look, not a figure")] = False,
    peer: Annotated[str, typer.Option(help="none, or llama.cpp beside all that take it")] = "none",
    peer_python: PeerPython = None,
    keep: Annotated[
        Path | None, typer.Option(help="folder for the JSON of each; what is there already is not measured again")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write tables and pictures into this file")] = None,
    json: Json = False,
) -> None:
    """Run every benchmark as a process of its own, an hour or so; --json joins their rows, --html draws them."""
    from colibri_lab.bench import page, suite
    from colibri_lab.export import write
    from colibri_lab.paths import file_to_write

    names = NAMES if only == "all" else tuple(only.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        typer.echo(f"colibri-lab: error: --only {unknown[0]!r} is none of {', '.join(NAMES)}", err=True)
        raise typer.Exit(suite.WRONG)
    if peer not in ("none", "llama.cpp"):
        typer.echo(f"colibri-lab: error: --peer {peer!r} is none of none, llama.cpp", err=True)
        raise typer.Exit(suite.WRONG)
    if html is not None:
        file_to_write(html)  # before an hour of work
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    parts = suite.run(names, quick, lambda line: typer.echo(line, err=True), peer, peer_python, keep)
    if html is not None:
        write(html, page.page(parts).encode())
    result = suite.together(parts)
    if json:
        typer.echo(result.to_json())
    else:
        result.show()
    raise typer.Exit(suite.exit_code(parts))
