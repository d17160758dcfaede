"""`colibri-lab bench load`, `kernels`, `budget`, `scaling`, `convert`: what bounds the engine, and how it grows."""

from __future__ import annotations

from typing import Annotated

import typer

from colibri_lab.bench.command import AnyModel, PeerName, PeerPython, ShapeName, Threads, benchmark, numbers
from colibri_lab.bench.load_commands import app
from colibri_lab.bench.result import Result

__all__ = ["app"]
Rounds = Annotated[int, typer.Option(min=1)]


@benchmark("load")
def load_command(
    shape: AnyModel = "embedded",
    prompt: Annotated[int, typer.Option(min=1, help="tokens of a shape's prompt, and of the peer's")] = 8,
    threads: Threads = 2,
    rounds: Rounds = 5,
    peer: PeerName = "none",
    peer_python: PeerPython = None,
) -> Result:
    """From the start of a process to its first token, with the model's file cold."""
    from colibri_lab.bench import decode, ours, start

    chosen = None if shape == ours.EMBEDDED else decode.shape_named(shape)
    return start.run(start.Plan(chosen, prompt, rounds, threads), peer, peer_python)


@benchmark("kernels")
def kernels_command(
    shape: ShapeName = "m1",
    batches: Annotated[str, typer.Option(help="rows that share an expert's weights, by commas")] = "1,2,4,8,64",
    levels: Annotated[str, typer.Option(help="ISA levels by commas, best first; all that run here")] = "all",
    threads: Threads = 1,
    rounds: Rounds = 5,
) -> Result:
    """Each CPU kernel's bytes and operations a second beside the memory's rate, ISA levels side by side."""
    from colibri_lab.bench import decode, kernels

    chosen = () if levels == "all" else tuple(levels.split(","))
    plan = kernels.Plan(decode.shape_named(shape), numbers("batches", batches), chosen, rounds, threads)
    return kernels.run(plan)


@benchmark("budget")
def budget_command(
    shape: ShapeName = "m2",
    share: Annotated[int, typer.Option(min=5, max=100, help="per cent of the model that a side's memory may be")] = 54,
    tokens: Annotated[int, typer.Option(min=2, help="read one by one, from empty frames")] = 64,
    peer_tokens: Annotated[int, typer.Option(min=1, help="of the peer, which takes seconds for each")] = 8,
    threads: Threads = 2,
    rounds: Rounds = 3,
    engine_mode: Annotated[str, typer.Option(help="sync or async")] = "sync",
    prefetcher: Annotated[str, typer.Option(help="none, neighbour, history, next_gate")] = "none",
    peer: PeerName = "none",
    peer_python: PeerPython = None,
) -> Result:
    """Less memory than the model: ours under its budget, llama.cpp under a memory group, and the disk's limit."""
    from colibri_lab.bench import budget, decode

    plan = budget.Plan(decode.shape_named(shape), share, tokens, peer_tokens, rounds, threads, engine_mode, prefetcher)
    return budget.run(plan, peer, peer_python)


@benchmark("scaling")
def scaling_command(
    experts: Annotated[str, typer.Option(help="of a layer, by commas")] = "8,32,128,512",
    layers: Annotated[str, typer.Option(help="by commas")] = "2,4,8,16",
    context: Annotated[
        str, typer.Option(help="tokens before the one that is timed, by commas")
    ] = "1024,4096,16384,65536",
    sequences: Annotated[str, typer.Option(help="that advance together, by commas")] = "1,2,4,8,16,32",
    only: Annotated[str, typer.Option(help="by commas, of experts, layers, context, sequences; all")] = "all",
    tokens: Annotated[int, typer.Option(min=2, help="decoded in a round")] = 16,
    threads: Threads = 1,
    rounds: Rounds = 5,
) -> Result:
    """Exponents of time and memory over experts, layers, context and sequences, beside those of the model's bytes."""
    from colibri_lab.bench import scaling

    sizes = {
        name: numbers(name, given)
        for name, given in (("experts", experts), ("layers", layers), ("context", context), ("sequences", sequences))
    }
    axes = scaling.AXES if only == "all" else tuple(only.split(","))
    return scaling.run(scaling.Plan(**sizes, tokens=tokens, rounds=rounds, threads=threads), axes)


@benchmark("convert")
def convert_command(
    shape: ShapeName = "m1",
    quantize: Annotated[str, typer.Option(help="fp16, int8 or int4")] = "int4",
    rounds: Rounds = 3,
) -> Result:
    """Conversion of an fp16 checkpoint of the shape (m1: 2.6 GB): megabytes of input a second, and memory."""
    from colibri_lab.bench import conversion, decode

    return conversion.run(conversion.Plan(decode.shape_named(shape), quantize, rounds))
