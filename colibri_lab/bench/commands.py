"""`colibri-lab bench`: each command prints a table, or with --json ends with one JSON line.

Exit codes: 0 done, 2 wrong input or a missing peer, 3 the machine was too noisy for the figures to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from colibri_lab.bench.peer import PEERS, PeerError
from colibri_lab.bench.result import Result

app = typer.Typer(
    help="Measure the engine beside its limits and its peers.", no_args_is_help=True, pretty_exceptions_enable=False
)
VALIDATION = Path(__file__).resolve().parents[2] / "data" / "validation"  # in a checkout

Json = Annotated[bool, typer.Option("--json", help="end with one JSON line instead of a table")]


@app.command("decode")
def decode_command(
    shape: Annotated[str, typer.Option(help="random weights of this shape: nano, m0, m1, m2")] = "m1",
    threads: Annotated[int, typer.Option(min=1, help="compute threads of both sides")] = 1,
    peer: Annotated[str, typer.Option(help=f"run beside: {', '.join(PEERS)}")] = "none",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of the prompt before them")] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: Annotated[str, typer.Option(help="fast or exact")] = "fast",
    repack: Annotated[bool, typer.Option(help="llama.cpp lays its weights out anew at load (its default)")] = True,
    mmap: Annotated[bool, typer.Option(help="llama.cpp maps its file (its default)")] = True,
    peer_python: Annotated[
        str | None, typer.Option(help="interpreter that has the peer; default COLIBRI_PEER_PYTHON, else this one")
    ] = None,
    json: Json = False,
) -> None:
    """Tokens a second on random weights, beside a peer and the memory's floor."""

    def measure() -> Result:
        from colibri_lab.bench import decode

        if peer not in PEERS:
            raise ValueError(f"--peer {peer!r} is none of {', '.join(PEERS)}")
        chosen = decode.shape_named(shape)
        longest = chosen.positions - tokens - 1
        if prompt > longest:
            raise ValueError(f"--prompt {prompt} is longer than shape {shape} leaves room for: {longest}")
        plan = decode.Plan(chosen, threads, rounds, tokens, prompt, seed, precision)
        return decode.run(plan, peer, peer_python, repack, mmap)

    finish(measure, json)


@app.command("telemetry")
def telemetry_command(
    shape: Annotated[str, typer.Option(help="nano, m0, m1, m2 or embedded")] = "m1",
    rounds: Annotated[int, typer.Option(min=2)] = 30,
    tokens: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 32,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Json = False,
) -> None:
    """What full telemetry costs: decode with and without it, in turn."""

    def measure() -> Result:
        from colibri_lab.bench import decode, ours, overhead

        return overhead.run(None if shape == ours.EMBEDDED else decode.shape_named(shape), rounds, tokens, seed)

    finish(measure, json)


@app.command("perplexity")
def perplexity_command(
    text: Annotated[Path, typer.Option(help="folder of held-out texts, one .txt for each domain")] = VALIDATION,
    characters: Annotated[int, typer.Option(min=1, help="of each domain")] = 12000,
    json: Json = False,
) -> None:
    """What quantisation costs the embedded model: int8 and int4 beside fp16."""

    def measure() -> Result:
        from colibri_lab.bench import quality

        return quality.run(text, characters=characters)

    finish(measure, json)


@app.command("router")
def router_command(
    text: Annotated[Path, typer.Option(help="folder of texts that the embedded model reads")] = VALIDATION,
    rows: Annotated[int, typer.Option(min=1, help="different recorded hidden states, at least")] = 1_000_000,
    random_rows: Annotated[int, typer.Option(min=1, help="random hidden states of each size")] = 100_000,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    characters: Annotated[int, typer.Option(min=1, help="of each domain, for perplexity")] = 12000,
    bits: Annotated[
        int | None, typer.Option(min=8, max=16, help="of the codes; default 8, and 12 from 65 experts up")
    ] = None,
    json: Json = False,
) -> None:
    """Routers on recorded and random hidden states: ns a row, wrong selections, fallbacks, perplexity."""

    def measure() -> Result:
        from colibri_lab.bench import router

        return router.run(text, router.Plan(rows, random_rows, rounds, characters, bits))

    finish(measure, json)


@app.command("paging")
def paging_command(
    shape: Annotated[str, typer.Option(help="embedded, or random weights: nano, m0, m1, m2 (2 GB)")] = "embedded",
    budgets: Annotated[str, typer.Option(help="per cent of all experts, by commas")] = "25,50,75",
    policies: Annotated[str, typer.Option(help="eviction policies, by commas; all")] = "all",
    prefetchers: Annotated[str, typer.Option(help="by commas, as none,next_gate,next_gate+history; all")] = "all",
    tokens: Annotated[int, typer.Option(min=1, help="written after each text's beginning; shapes: read")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each setting; medians of them")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="compute threads")] = 1,
    engine_mode: Annotated[str, typer.Option(help="sync or async")] = "sync",
    text: Annotated[Path, typer.Option(help="folder of texts, one .txt for each domain")] = VALIDATION,
    json: Json = False,
) -> None:
    """Hit rates, I/O wait and speed of each eviction policy and prefetcher, beside Belady's best."""

    def measure() -> Result:
        from colibri_lab.bench import decode, ours, paging
        from colibri_lab.config import EVICTION, PREFETCH

        def names(given: str, all_: Sequence[str]) -> Sequence[str]:
            return all_ if given == "all" else given.split(",")

        shares, ahead = numbers("budgets", budgets), names(prefetchers, PREFETCH)
        if engine_mode not in ("sync", "async"):
            raise ValueError(f"--engine-mode {engine_mode!r} is neither sync nor async")
        plan = paging.Plan(shares, names(policies, EVICTION), ahead, tokens, rounds, threads, engine_mode)
        return paging.run(text, plan, None if shape == ours.EMBEDDED else decode.shape_named(shape))

    finish(measure, json)


@app.command("dispatch")
def dispatch_command(
    steps: Annotated[int, typer.Option(min=1, help="of a round")] = 200,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    json: Json = False,
) -> None:
    """What it costs to hand a layer's rows to their experts: microseconds, bytes copied, ring fill, stalls."""

    def measure() -> Result:
        from colibri_lab.bench import dispatch

        return dispatch.run(dispatch.Plan(steps=steps, rounds=rounds))

    finish(measure, json)


@app.command("pipeline")
def pipeline_command(
    shape: Annotated[str, typer.Option(help="random weights of this shape: nano, m0, m1, m2 (2 GB)")] = "m2",
    budgets: Annotated[str, typer.Option(help="per cent of all experts, by commas")] = "50,75,90,100",
    batches: Annotated[str, typer.Option(help="sequences that advance together, by commas")] = "1,8",
    tokens: Annotated[int, typer.Option(min=2, help="of each sequence in a round")] = 24,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="compute threads")] = 2,
    prefetcher: Annotated[str, typer.Option(help="of both sides")] = "none",
    json: Json = False,
) -> None:
    """The asynchronous engine beside the synchronous one: speed, stage times, and what overlap could give at most."""

    def measure() -> Result:
        from colibri_lab.bench import decode, pipeline
        from colibri_lab.config import PREFETCH

        if prefetcher not in PREFETCH:
            raise ValueError(f"--prefetcher {prefetcher!r} is none of {', '.join(PREFETCH)}")
        shares, together = numbers("budgets", budgets), numbers("batches", batches)
        plan = pipeline.Plan(decode.shape_named(shape), shares, together, tokens, rounds, threads, prefetcher)
        return pipeline.run(plan)

    finish(measure, json)


@app.command("kv")
def kv_command(
    shape: Annotated[str, typer.Option(help="random weights of this shape: nano, m0, m1, m2")] = "m1",
    lengths: Annotated[str, typer.Option(help="tokens of history, by commas")] = "4096,16384,32768",
    threads: Annotated[int, typer.Option(min=1, help="compute threads")] = 1,
    rounds: Annotated[int, typer.Option(min=2)] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    text: Annotated[Path, typer.Option(help="folder of texts that the embedded model reads")] = VALIDATION,
    characters: Annotated[int, typer.Option(min=1, help="of each domain, for perplexity")] = 12000,
    json: Json = False,
) -> None:
    """Expert-local attention beside exact: bytes, speed, logits, perplexity; and what placing a token costs."""

    def measure() -> Result:
        from colibri_lab.bench import decode, kv

        asked = numbers("lengths", lengths)
        plan = kv.Plan(decode.shape_named(shape), asked, threads, rounds, tokens, seed, characters)
        return kv.run(text, plan)

    finish(measure, json)


@app.command("persist")
def persist_command(
    shape: Annotated[str, typer.Option(help="random weights of this shape: nano, m0, m1, m2")] = "m1",
    tokens: Annotated[int, typer.Option(min=1, help="of the long context")] = 65536,
    computed: Annotated[int, typer.Option(min=1, help="last tokens of its prompt that are computed, not drawn")] = 64,
    rounds: Annotated[int, typer.Option(min=2)] = 9,
    decode: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 4,
    experts: Annotated[float, typer.Option(min=0, max=1, help="share of the experts that has room in memory")] = 1.0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    kv_dtype: Annotated[str, typer.Option(help="fp16 or fp32")] = "fp16",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Json = False,
) -> None:
    """KV persistence: anonymous memory, tokens a second with and without, and the first token after a restart."""

    def measure() -> Result:
        from colibri_lab.bench import persist

        plan = persist.Plan(shape, tokens, computed, rounds, decode, experts, threads, kv_dtype, seed)
        return persist.run(plan)

    finish(measure, json)


def numbers(option: str, given: str) -> list[int]:
    """Whole numbers by commas; ValueError names the option."""
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"--{option} {given!r}: whole numbers by commas, as 25,50,75") from None


def finish(measure: Callable[[], Result], as_json: bool) -> None:
    """Run, print, and leave with the exit code that the result asks for."""
    try:
        result = measure()
    except (PeerError, ValueError) as error:
        typer.echo(f"colibri-lab: error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(result.to_json())
    else:
        result.show()
    raise typer.Exit(result.exit_code)
