"""What the commands share: options that several have, the configuration that they describe, and words to stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .errors import ConfigError

WRONG_INPUT = 2

ConfigFile = Annotated[Path | None, typer.Option("--config", help="config.yaml")]
Model = Annotated[
    Path | None, typer.Option("--model", help="model folder or .colibri file; neither: the embedded model")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="any key of config.yaml, as key=value; may be repeated")]


def configured(config: Path | None, model: Path | None, settings: list[str] | None) -> tuple[Any, dict[str, Any]]:
    """(the Config that the options describe, what they set beside the file)."""
    from .config import Config
    from .paths import embedded_model

    if settings:  # a parser that most starts do without
        from .yamlfile import parse_mapping
    overrides: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: must be key=value")
        overrides[name.strip()] = parse_mapping(f"value: {value}".encode(errors="replace"), f"--set {name}").get(
            "value"
        )
    if model is not None:
        if "model_path" in overrides:
            raise ConfigError("--set model_path: the model is named by --model already; give one of the two")
        overrides["model_path"] = model
    if config is not None:
        chosen = Config.from_yaml(config, **overrides)  # whatever the file's name ends in
        if chosen.model_path is None:
            raise ConfigError(f"{config}: model_path: names no model; name one there, or with --model")
    else:
        chosen = Config.make({"model_path": embedded_model()} | overrides)
    return chosen, overrides


def info(what: str, fact: str) -> None:
    sys.stderr.write(f"INFO  {what:8}{fact}\n")
    sys.stderr.flush()


def wrong(message: str) -> int:
    sys.stderr.write(f"colibri-lab: error: {message}\n")
    return WRONG_INPUT


def fail(message: str) -> NoReturn:
    wrong(message)
    raise typer.Exit(WRONG_INPUT)
