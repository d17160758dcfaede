"""`colibri-lab bench`: decode and prefill, and what each of the engine's systems does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from colibri_lab.bench.command import (
    VALIDATION,
    AnyModel,
    PeerName,
    PeerPython,
    ShapeName,
    Threads,
    app,
    benchmark,
    numbers,
)
from colibri_lab.bench.result import Result

__all__ = ["app"]
Repack = Annotated[bool, typer.Option(help="llama.cpp lays its weights out anew at load (its default)")]
Mmap = Annotated[bool, typer.Option(help="llama.cpp maps its file (its default)")]
Model = Annotated[Path | None, typer.Option(help="a model of yours instead of a shape; no peer")]
Isa = Annotated[
    str | None, typer.Option(help="level of ours and of transformers: amx, avx512, avx2, plain; default: the best")
]


@benchmark("decode")
def decode_command(
    shape: ShapeName = "m1",
    model: Model = None,
    threads: Threads = 1,
    peer: PeerName = "none",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="tokens of the prompt before them")] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: Annotated[str, typer.Option(help="fast or exact")] = "fast",
    isa: Isa = None,
    repack: Repack = True,
    mmap: Mmap = True,
    peer_python: PeerPython = None,
) -> Result:
    """Tokens a second on random weights, beside a peer and the memory's floor."""
    from colibri_lab.bench import decode

    plan = decode.Plan(decode.subject(shape, model), threads, rounds, tokens, prompt, seed, precision, isa)
    return decode.run(plan, peer, peer_python, repack, mmap)


@benchmark("prefill")
def prefill_command(
    shape: ShapeName = "m1",
    model: Model = None,
    threads: Threads = 1,
    peer: PeerName = "none",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="of the prompt")] = 256,
    chunk: Annotated[int, typer.Option(min=1, help="prompt tokens of a step of ours (prefill_chunk)")] = 256,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    precision: Annotated[str, typer.Option(help="fast or exact")] = "fast",
    isa: Isa = None,
    repack: Repack = True,
    mmap: Mmap = True,
    peer_python: PeerPython = None,
) -> Result:
    """A prompt's tokens a second on random weights, beside a peer."""
    from colibri_lab.bench import decode

    plan = decode.Plan(decode.subject(shape, model), threads, rounds, 0, tokens, seed, precision, isa, chunk)
    return decode.run(plan, peer, peer_python, repack, mmap)


@benchmark("telemetry")
def telemetry_command(
    shape: AnyModel = "m1",
    rounds: Annotated[int, typer.Option(min=2)] = 30,
    tokens: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 32,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> Result:
    """What full telemetry costs: decode with and without it, in turn."""
    from colibri_lab.bench import decode, ours, overhead

    return overhead.run(None if shape == ours.EMBEDDED else decode.shape_named(shape), rounds, tokens, seed)


@benchmark("perplexity")
def perplexity_command(
    text: Annotated[Path, typer.Option(help="folder of held-out texts, one .txt for each domain")] = VALIDATION,
    characters: Annotated[int, typer.Option(min=1, help="of each domain")] = 12000,
) -> Result:
    """What quantisation costs the embedded model: int8 and int4 beside fp16."""
    from colibri_lab.bench import quality

    return quality.run(text, characters=characters)


@benchmark("router")
def router_command(
    text: Annotated[Path, typer.Option(help="folder of texts that the embedded model reads")] = VALIDATION,
    rows: Annotated[int, typer.Option(min=1, help="different recorded hidden states, at least")] = 1_000_000,
    random_rows: Annotated[int, typer.Option(min=1, help="random hidden states of each size")] = 100_000,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    characters: Annotated[int, typer.Option(min=1, help="of each domain, for perplexity")] = 12000,
    bits: Annotated[
        int | None, typer.Option(min=8, max=16, help="of the codes; default 8, and 12 from 65 experts up")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="of 256 tokens, with experts missing, for two_stage")] = 16,
) -> Result:
    """Routers on recorded and random hidden states: ns a row, wrong selections, fallbacks, perplexity; and the reads
    that begin between the stages of two_stage."""
    from colibri_lab.bench import router

    return router.run(text, router.Plan(rows, random_rows, rounds, characters, bits, prompts=prompts))


@benchmark("paging")
def paging_command(
    shape: AnyModel = "embedded",
    budgets: Annotated[str, typer.Option(help="per cent of all experts, by commas")] = "25,50,75",
    policies: Annotated[str, typer.Option(help="eviction policies, by commas; all")] = "all",
    prefetchers: Annotated[str, typer.Option(help="by commas, as none,next_gate,next_gate+history; all")] = "all",
    tokens: Annotated[int, typer.Option(min=1, help="written after each text's beginning; shapes: read")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each setting; medians of them")] = 1,
    threads: Threads = 1,
    engine_mode: Annotated[str, typer.Option(help="sync or async")] = "sync",
    text: Annotated[Path, typer.Option(help="folder of texts, one .txt for each domain")] = VALIDATION,
) -> Result:
    """Hit rates, I/O wait and speed of each eviction policy and prefetcher, beside Belady's best."""
    from colibri_lab.bench import decode, ours, paging
    from colibri_lab.config import EVICTION, PREFETCH

    def names(given: str, all_: Sequence[str]) -> Sequence[str]:
        return all_ if given == "all" else given.split(",")

    shares, ahead = numbers("budgets", budgets), names(prefetchers, PREFETCH)
    if engine_mode not in ("sync", "async"):
        raise ValueError(f"--engine-mode {engine_mode!r} is neither sync nor async")
    plan = paging.Plan(shares, names(policies, EVICTION), ahead, tokens, rounds, threads, engine_mode)
    return paging.run(text, plan, None if shape == ours.EMBEDDED else decode.shape_named(shape))


@benchmark("dispatch")
def dispatch_command(
    steps: Annotated[int, typer.Option(min=1, help="of a round")] = 200,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
) -> Result:
    """What it costs to hand a layer's rows to their experts: microseconds, bytes copied, ring fill, stalls."""
    from colibri_lab.bench import dispatch

    return dispatch.run(dispatch.Plan(steps=steps, rounds=rounds))


@benchmark("pipeline")
def pipeline_command(
    shape: ShapeName = "m2",
    budgets: Annotated[str, typer.Option(help="per cent of all experts, by commas")] = "50,75,90,100",
    batches: Annotated[str, typer.Option(help="sequences that advance together, by commas")] = "1,8",
    tokens: Annotated[int, typer.Option(min=2, help="of each sequence in a round")] = 24,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Threads = 2,
    prefetcher: Annotated[str, typer.Option(help="of the asynchronous side")] = "none",
) -> Result:
    """The asynchronous engine beside the synchronous one: speed, stage times, and what overlap could give at most."""
    from colibri_lab.bench import decode, pipeline
    from colibri_lab.config import PREFETCH, several

    if prefetcher not in PREFETCH and not several(prefetcher):
        raise ValueError(f"--prefetcher {prefetcher!r} is none of {', '.join(PREFETCH)}")
    shares, together = numbers("budgets", budgets), numbers("batches", batches)
    plan = pipeline.Plan(decode.shape_named(shape), shares, together, tokens, rounds, threads, prefetcher)
    return pipeline.run(plan)


@benchmark("kv")
def kv_command(
    shape: ShapeName = "m1",
    lengths: Annotated[str, typer.Option(help="tokens of history, by commas")] = "4096,16384,32768",
    threads: Threads = 1,
    rounds: Annotated[int, typer.Option(min=2)] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    text: Annotated[Path, typer.Option(help="folder of texts that the embedded model reads")] = VALIDATION,
    characters: Annotated[int, typer.Option(min=1, help="of each domain, for perplexity")] = 12000,
    peer: PeerName = "none",
    peer_python: PeerPython = None,
) -> Result:
    """Expert-local attention beside exact: bytes, speed, logits, perplexity; and what placing a token costs."""
    from colibri_lab.bench import decode, kv

    asked = numbers("lengths", lengths)
    plan = kv.Plan(decode.shape_named(shape), asked, threads, rounds, tokens, seed, characters)
    return kv.run(text, plan, peer, peer_python)


@benchmark("persist")
def persist_command(
    shape: ShapeName = "m1",
    tokens: Annotated[int, typer.Option(min=1, help="of the long context")] = 65536,
    computed: Annotated[int, typer.Option(min=1, help="last tokens of its prompt that are computed, not drawn")] = 64,
    rounds: Annotated[int, typer.Option(min=2)] = 9,
    decode: Annotated[int, typer.Option(min=1, help="tokens decoded in a round")] = 4,
    experts: Annotated[float, typer.Option(min=0, max=1, help="share of the experts that has room in memory")] = 1.0,
    threads: Threads = 2,
    kv_dtype: Annotated[str, typer.Option(help="fp16 or fp32")] = "fp16",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> Result:
    """KV persistence: anonymous memory, tokens a second with and without, and the first token after a restart."""
    from colibri_lab.bench import persist

    plan = persist.Plan(shape, tokens, computed, rounds, decode, experts, threads, kv_dtype, seed)
    return persist.run(plan)
