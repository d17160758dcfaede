"""What telemetry costs: the same decode with it and without it, in turn."""

from __future__ import annotations

from time import perf_counter_ns as clock
from time import thread_time_ns as cpu_clock

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, percentile
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.telemetry import NullTelemetry, Telemetry

BAR = 2.0  # per cent of decode
SAMPLES = 0.2  # the part of it that the sampled counters may cost
CONTROL = 1.0  # per cent by which two sides that do the same may differ
QUARTER = 0.25  # noise only ever adds time, so the best quarter of the rounds is compared


def run(shape: Shape | None, rounds: int = 30, tokens: int = 32, seed: int = 0) -> Result:
    """CPU time of decode on one thread, telemetry on against off. shape: None for the embedded model.

    A third side, off once more, is the control: what the two differ by is noise. All sides share one engine, since two
    engines differ by where the system put their memory, which weighs more than telemetry does.
    """
    result = Result(f"telemetry {shape.name if shape else ours.EMBEDDED}")
    engine = ours.load(shape, seed, 1, max_batch_size=1, kv_cache_max_slots=512)
    prompt = np.random.default_rng(seed).integers(3, engine.describe()["vocab"], 32).tolist()

    def side(telemetry: Telemetry) -> Block:
        ours.listen(engine, telemetry)
        return ours.decode(engine, prompt, tokens)[1]

    on, off = engine.telemetry, NullTelemetry()
    try:
        sides = {"off": lambda: side(off), "on": lambda: side(on), "control": lambda: side(off)}
        interleave(2, sides)  # warm up
        blocks = interleave(rounds, sides)
        sample_s = sampling(engine, on, prompt, tokens)
    finally:
        engine.close()
    took = {name: percentile([b.cpu_s / b.work for b in found], QUARTER) for name, found in blocks.items()}
    without = (took["off"] + took["control"]) / 2
    noise = abs(took["off"] - took["control"]) / without * 100
    result.add(
        "decode, telemetry on, CPU time", 1 / took["on"], "tokens/s", peer="telemetry off", peer_value=1 / without
    )
    result.add("cost of telemetry", max((took["on"] / without - 1) * 100, 0.0), "% of decode", limit=BAR)
    result.add("cost of telemetry", (took["on"] - without) * 1e6, "us a token")
    each = "ten samples of the counters a second"
    result.add(each, 10 * sample_s * 100, "% of decode", limit=SAMPLES)
    result.add("control: off against off", noise, "% of decode", limit=CONTROL)
    if noise > CONTROL:
        result.reasons.append(f"two sides without telemetry differ by {noise:.1f} %")
    return result


def sampling(engine: Engine, telemetry: Telemetry, prompt: list[int], tokens: int) -> float:
    """CPU seconds of one sample of the counters, right after a token that left nothing of it in the cache."""
    took = []
    for _ in engine.generate(prompt, max_tokens=tokens):
        begin = cpu_clock()
        engine._stepper.sampler.sample(telemetry, clock())
        took.append(cpu_clock() - begin)
    return percentile(took, 0.5) / 1e9
