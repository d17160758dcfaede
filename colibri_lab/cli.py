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
from typing import Annotated, Any

import typer

from . import cli_lab, terminal
from .errors import ConfigError, PagerError, RequestError, RouterError
from .options import WRONG_INPUT, ConfigFile, Model, Set, configured, fail, info, wrong
from .performance import facts, performance, performance_line
from .planning.boards import BOARDS, CARDS

app = typer.Typer(name="colibri-lab", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
INTERRUPTED = 130

Prompt = Annotated[str, typer.Option("--prompt", help="the prompt; - reads it from stdin")]
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
    info("trace", str(out))


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
    info("done", str(made))


@app.command()
def plan(
    model_config: Annotated[Path, typer.Option("--model-config", help="config.json of a Hugging Face model")],
    board: Annotated[str | None, typer.Option(help=f"a machine that is known: {', '.join(BOARDS)}")] = None,
    ram: Annotated[str | None, typer.Option(help="memory for the engine, as 32GB")] = None,
    dram: Annotated[str | None, typer.Option(help="rate at which processors read memory, as 60GB/s")] = None,
    disk: Annotated[str | None, typer.Option(help="rate of the disk for single reads of a MiB or so, as 3GB/s")] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"a card: {', '.join(CARDS)}, or like 24GB,900GB/s,link=25GB/s")
    ] = None,
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
        model_config, board=board, ram=ram, dram=dram, disk=disk, gpu=gpu, quantize=quantize,
        group_size=group_size, context=context, kv_dtype=kv_dtype, trace=trace, as_json=as_json,
    )  # fmt: skip
    sys.stdout.write(said + "\n")


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure; `colibri-lab bench --help` lists what."""
    from .bench import main as run

    raise typer.Exit(run(context.args) or 0)


cli_lab.add(app)


def _later(name: str, what: str) -> None:
    @app.command(name, context_settings=PASS_ON, help=f"{what} (not available yet)")
    def refuse(context: typer.Context) -> None:
        fail(f"{name}: not available yet")


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
        return wrong(str(error))
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
        return wrong(f"{error.filename or 'system'}: {error.strerror or error}")
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return WRONG_INPUT  # the help was shown
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a usage error of the command-line parser
            return wrong(error.format_message())
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
        info("done", performance_line(result, before))
    if as_json:
        sys.stdout.write(json.dumps({"text": "".join(text), **result}, allow_nan=False) + "\n")


@contextmanager
def _engine(config: Path | None, model: Path | None, settings: list[str] | None) -> Iterator[Any]:
    """The engine that the options describe, with its facts on stderr."""
    from .engine import Engine

    with Engine.load(configured(config, model, settings)[0]) as engine:
        for what, fact in facts(engine.describe(), engine.settings):
            info(what, fact)
        yield engine


def _prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read()
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
