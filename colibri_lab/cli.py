"""The command line. Text goes to stdout alone; facts, progress and errors to stderr.

Exit codes: 0 done, 2 wrong input, 3 not trustworthy (a noisy benchmark), 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import terminal
from .errors import ConfigError, PagerError, RequestError, RouterError
from .performance import facts, performance, performance_line
from .planning.boards import BOARDS

app = typer.Typer(name="colibri-lab", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
WRONG_INPUT, INTERRUPTED = 2, 130

ConfigFile = Annotated[Path | None, typer.Option("--config", help="config.yaml")]
Model = Annotated[
    Path | None, typer.Option("--model", help="model folder or .colibri file; neither: the embedded model")
]
Prompt = Annotated[str, typer.Option("--prompt", help="the prompt; - reads it from stdin")]
Set = Annotated[list[str] | None, typer.Option("--set", help="any key of config.yaml, as key=value; may be repeated")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="most tokens to generate")]
Temperature = Annotated[float, typer.Option(help="0: always the most probable token")]
TopK = Annotated[int, typer.Option(help="choose among the k most probable; 0: all")]
TopP = Annotated[float, typer.Option(help="choose among the most probable that reach this probability; 1: all")]
MinP = Annotated[float, typer.Option(help="drop tokens below this share of the most probable one's probability")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="above 1: repeat less")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]
Stop = Annotated[list[str] | None, typer.Option(help="end at this text; may be repeated")]


@app.command()
def generate(
    prompt: Prompt = "", config: ConfigFile = None, model: Model = None, max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0, seed: Seed = None, stop: Stop = None, settings: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line instead of text")] = False,
) -> None:  # fmt: skip
    """Generate text from a prompt."""
    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop,
    }  # fmt: skip
    with _engine(config, model, settings) as engine:
        _generate(engine, _prompt(prompt), sampling, as_json)


@app.command()
def trace(
    out: Annotated[Path, typer.Option("--out", help="file to write")] = Path("trace.jsonl"),
    prompt: Prompt = "", config: ConfigFile = None, model: Model = None, max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0, top_k: TopK = 0, top_p: TopP = 1.0, min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0, seed: Seed = None, stop: Stop = None, settings: Set = None,
) -> None:  # fmt: skip
    """Generate, and record everything that happens into a file that the lab can replay."""
    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop,
    }  # fmt: skip
    from .telemetry import Recorder

    with _engine(config, model, settings) as engine:
        recorder = Recorder(engine.telemetry, out)
        try:
            _generate(engine, _prompt(prompt), sampling, as_json=False)
        finally:
            recorder.close()
    _info("trace", str(out))


@app.command()
def convert(
    model_dir: Annotated[Path, typer.Argument(help="Hugging Face folder")],
    out_dir: Annotated[Path, typer.Argument(help="folder to make")],
    quantize: Annotated[str, typer.Option(help="fp32, fp16, int8 or int4")] = "int4",
    group_size: Annotated[int, typer.Option(help="inputs that share one scale: 32, 64 or 128")] = 32,
    expert_split: Annotated[int | None, typer.Option(help="number of experts; must be the model's")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a model that is there already")] = False,
) -> None:
    """Convert a Hugging Face folder into model.colibri."""
    from .convert import convert as run

    made = run(
        model_dir,
        out_dir,
        quantize=quantize,
        group_size=group_size,
        expert_split=expert_split,
        progress=True,
        overwrite=overwrite,
    )
    _info("done", str(made))


@app.command()
def plan(
    model_config: Annotated[Path, typer.Option("--model-config", help="config.json of a Hugging Face model")],
    board: Annotated[str | None, typer.Option(help=f"a machine that is known: {', '.join(BOARDS)}")] = None,
    ram: Annotated[str | None, typer.Option(help="memory for the engine, as 32GB")] = None,
    dram: Annotated[str | None, typer.Option(help="rate at which processors read memory, as 60GB/s")] = None,
    disk: Annotated[str | None, typer.Option(help="rate of the disk, as 3GB/s")] = None,
    quantize: Annotated[str, typer.Option(help="fp32, fp16, int8 or int4")] = "int4",
    group_size: Annotated[int, typer.Option(help="inputs that share one scale: 32, 64 or 128")] = 32,
    context: Annotated[int | None, typer.Option(help="tokens of the sequence; none: 4096, or the model's most")] = None,
    kv_dtype: Annotated[str, typer.Option(help="fp16 or fp32")] = "fp16",
    trace: Annotated[Path | None, typer.Option(help="recorded run of the model, for its hit rate")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line instead of text")] = False,
) -> None:
    """Predict tokens a second, the experts in memory, and what bounds them, for a machine and a model's config."""
    from .planning.answer import answer

    said = answer(
        model_config, board=board, ram=ram, dram=dram, disk=disk, quantize=quantize, group_size=group_size,
        context=context, kv_dtype=kv_dtype, trace=trace, as_json=as_json,
    )  # fmt: skip
    sys.stdout.write(said + "\n")


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure; `colibri-lab bench --help` lists what."""
    from .bench import main as run

    raise typer.Exit(run(context.args) or 0)


@app.command()
def lab(notebook: Annotated[Path | None, typer.Argument(help="notebook to open; none: the quickstart")] = None) -> None:
    """Open JupyterLab on the quickstart, on loopback; it asks nobody outside for news or newer versions."""
    import importlib.util
    import os
    import subprocess

    if importlib.util.find_spec("jupyterlab") is None:
        _fail("JupyterLab is not installed; pip install jupyterlab")
    quickstart = Path(__file__).resolve().parent.parent / "notebooks" / "00_quickstart.ipynb"
    chosen = notebook or (quickstart if quickstart.exists() else None)
    if notebook is not None and not notebook.exists():
        _fail(f"{notebook}: no such notebook")
    if chosen is None:
        _info("lab", "notebooks/ is not part of an installed package: opening JupyterLab in this folder")
    command = [sys.executable, "-m", "jupyterlab", "--LabApp.news_url=None"]
    command.append("--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # JupyterLab refuses root unless told; in a container one often is
        command.append("--allow-root")
    raise typer.Exit(subprocess.call([*command, *([str(chosen)] if chosen else [])]))


@app.command()
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
        chosen, given = _chosen(config, model, settings)
        named = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
        source = config or Path(named.pop("model_path", chosen.model_path))
        book = page.notebook(source, named)
    raise typer.Exit(page.serve(book, port, browser, dark))


def _later(name: str, what: str) -> None:
    @app.command(name, context_settings=PASS_ON, help=f"{what} (not available yet)")
    def refuse(context: typer.Context) -> None:
        _fail(f"{name}: not available yet")


_later("doctor", "Check this machine's set-up.")
_later("serve", "Serve a model over HTTP.")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code. Wrong input is one line on stderr, never a traceback."""
    terminal.prepare()
    from .model.errors import ModelError
    from .ops.build import KernelError
    from .trace import TraceError

    try:
        code = app(args=arguments, prog_name="colibri-lab", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except (ConfigError, ModelError, RequestError, RouterError, PagerError, KernelError, TraceError) as error:
        return _error(str(error))
    except typer.Exit as end:
        return int(end.exit_code)
    except (BrokenPipeError, SystemExit) as end:  # the parser turns the first into the second
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        terminal.to_nowhere(1)  # the reader has what it wanted; the interpreter must not try to flush the rest
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:  # of a file or folder that was named
        return _error(f"{error.filename or 'system'}: {error.strerror or error}")
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return WRONG_INPUT  # the help was shown
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a usage error of the command-line parser
            return _error(error.format_message())
        raise


def _generate(engine: Any, prompt: str, sampling: dict[str, Any], as_json: bool) -> None:
    before, begin, times, text = engine.counters(), time.perf_counter(), [], []
    latencies: list[float] = []
    tokens = engine.generate(prompt, **sampling)
    try:
        for token in tokens:
            times.append(time.perf_counter())
            text.append(token.text)
            latencies.append(token.latency_ms)
            if not as_json and token.text:
                sys.stdout.write(token.text)
                sys.stdout.flush()
    finally:
        tokens.close()
        if not as_json and sys.exc_info()[0] is not BrokenPipeError:
            sys.stdout.write("\n")
            sys.stdout.flush()
        result = performance(begin, times, latencies, engine.counters())
        _info("done", performance_line(result, before))
    if as_json:
        sys.stdout.write(json.dumps({"text": "".join(text), **result}, allow_nan=False) + "\n")


@contextmanager
def _engine(config: Path | None, model: Path | None, settings: list[str] | None) -> Iterator[Any]:
    """The engine that the options describe, with its facts on stderr."""
    from .engine import Engine

    with Engine.load(_chosen(config, model, settings)[0]) as engine:
        for what, fact in facts(engine.describe(), engine.settings):
            _info(what, fact)
        yield engine


def _chosen(config: Path | None, model: Path | None, settings: list[str] | None) -> tuple[Any, dict[str, Any]]:
    """(the Config that the options describe, what they set beside the file)."""
    from .config import Config
    from .paths import embedded_model
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


def _prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read()
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _info(what: str, fact: str) -> None:
    sys.stderr.write(f"INFO  {what:8}{fact}\n")
    sys.stderr.flush()


def _error(message: str) -> int:
    sys.stderr.write(f"colibri-lab: error: {message}\n")
    return WRONG_INPUT


def _fail(message: str) -> NoReturn:
    _error(message)
    raise typer.Exit(WRONG_INPUT)
