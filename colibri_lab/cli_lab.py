"""Commands for people who look: `lab`, `board` and `doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import ConfigError
from .options import WRONG_INPUT, ConfigFile, Model, Set, configured, fail, info


def add(app: typer.Typer) -> None:
    """Puts them into the command line."""
    for command in (lab, board, doctor):
        app.command()(command)


def lab(notebook: Annotated[Path | None, typer.Argument(help="notebook to open; none: the quickstart")] = None) -> None:
    """Open JupyterLab on the quickstart, on loopback; it asks nobody outside for news or newer versions."""
    import importlib.util
    import os
    import subprocess

    if importlib.util.find_spec("jupyterlab") is None:
        fail("JupyterLab is not installed; pip install jupyterlab")
    quickstart = Path(__file__).resolve().parent.parent / "notebooks" / "00_quickstart.ipynb"
    chosen = notebook or (quickstart if quickstart.exists() else None)
    if notebook is not None and not notebook.exists():
        fail(f"{notebook}: no such notebook")
    if chosen is None:
        info("lab", "notebooks/ is not part of an installed package: opening JupyterLab in this folder")
    command = [sys.executable, "-m", "jupyterlab", "--LabApp.news_url=None"]
    command.append("--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # JupyterLab refuses root unless told; in a container one often is
        command.append("--allow-root")
    raise typer.Exit(subprocess.call([*command, *([str(chosen)] if chosen else [])]))


def board(
    config: ConfigFile = None, model: Model = None, settings: Set = None,
    replay: Annotated[Path | None, typer.Option(help="a recorded run instead of a model")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the page, on loopback")] = 8866,
    browser: Annotated[bool, typer.Option(help="open the page")] = True,
    dark: Annotated[bool, typer.Option("--dark", help="light text on a dark page")] = False,
) -> None:  # fmt: skip
    """Show the board as a page of its own, without cells; each page that is opened loads an engine of its own."""
    from . import page
    from .telemetry import replay as read

    if replay is not None:
        if config or model or settings:
            raise ConfigError("--replay: a recorded run has no model and takes no settings")
        read(replay)  # what is wrong with it is said here, not on the page
        book = page.notebook(replay, {}, recorded=True)
    else:
        chosen, given = configured(config, model, settings)
        named = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
        source = config or Path(named.pop("model_path", chosen.model_path))
        book = page.notebook(source, named)
    raise typer.Exit(page.serve(book, port, browser, dark))


def doctor(
    folder: Annotated[Path | None, typer.Argument(help="where your models lie; none: the cache folder")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="what a GPU needs, and nothing else")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line instead of a list")] = False,
) -> None:
    """Check this machine, and say what would make it faster; exit code 2 where something does not work."""
    from . import doctor as checks

    if folder is not None and not folder.is_dir():
        fail(f"{folder}: no such folder")
    found = checks.gpus() if gpu else checks.examine(folder)
    sys.stdout.write(checks.as_json(found) if as_json else checks.in_words(found))
    raise typer.Exit(WRONG_INPUT if any(f.state == checks.BAD for f in found) else 0)
