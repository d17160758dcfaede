"""`colibri-lab bench batch` and `jitter`: the engine under load. With them `app` is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colibri_lab.bench.commands import VALIDATION, Json, app, finish
from colibri_lab.bench.result import Result

__all__ = ["app"]
ShapeName = Annotated[str, typer.Option(help="embedded, or random weights: nano, m0, m1, m2 (2 GB)")]
Threads = Annotated[int, typer.Option(min=1, help="compute threads")]
Mode = Annotated[str, typer.Option(help="engine_mode of all runs: sync or async")]
Texts = Annotated[Path, typer.Option(help="folder of texts for the embedded model, one .txt for each domain")]


@app.command("batch")
def batch_command(
    shape: ShapeName = "m1",
    batches: Annotated[str, typer.Option(help="requests that advance together, by commas")] = "1,4,8,16,32",
    tokens: Annotated[int, typer.Option(min=2, help="written by each request while all of them run")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="tokens given to each")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Threads = 1,
    engine_mode: Mode = "sync",
    text: Texts = VALIDATION,
    json: Json = False,
) -> None:
    """Tokens a second against the batch size, with latency, time to the first token, and memory."""

    def measure() -> Result:
        from colibri_lab.bench import batch, decode, ours

        try:
            sizes = [int(part) for part in batches.split(",")]
        except ValueError:
            raise ValueError(f"--batches {batches!r}: whole numbers by commas, as 1,4,8") from None
        plan = batch.Plan(sizes, tokens, prompt, rounds, threads, engine_mode)
        return batch.run(text, plan, None if shape == ours.EMBEDDED else decode.shape_named(shape))

    finish(measure, json)


@app.command("jitter")
def jitter_command(
    shape: ShapeName = "m1",
    budget: Annotated[int, typer.Option(min=2, max=100, help="per cent of the experts in memory")] = 50,
    tokens: Annotated[int, typer.Option(min=8, help="written after each text's beginning; shapes: read")] = 96,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    threads: Threads = 1,
    priority: Annotated[str, typer.Option(help="io_priority to compare with none")] = "high",
    mask: Annotated[str | None, typer.Option(help="cpu_affinity_mask, as 0x2; default: the last core")] = None,
    engine_mode: Mode = "sync",
    text: Texts = VALIDATION,
    json: Json = False,
) -> None:
    """A token's latency with and without disk priority and cores, alone and beside a disk-hungry process."""

    def measure() -> Result:
        from colibri_lab.bench import decode, jitter, ours
        from colibri_lab.config import Config

        wanted = Config.make({"io_priority": priority, "cpu_affinity_mask": mask})
        plan = jitter.Plan(budget, tokens, rounds, threads, priority, wanted.cpu_affinity_mask, engine_mode)
        return jitter.run(text, plan, None if shape == ours.EMBEDDED else decode.shape_named(shape))

    finish(measure, json)
