"""What telemetry costs: the same decode with it and without it, in turn."""

from __future__ import annotations

import numpy as np

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block, interleave, percentile
from colibri_lab.bench.result import Result
from colibri_lab.bench.shapes import Shape

BAR = 2.0  # per cent of decode
CONTROL = 1.0  # per cent by which two sides that do the same may differ
QUARTER = 0.25  # noise only ever adds time, so the best quarter of the rounds is compared


def run(shape: Shape | None, rounds: int = 30, tokens: int = 32, seed: int = 0) -> Result:
    """CPU time of decode on one thread, telemetry on against off. shape: None for the embedded model.

    A third side, off once more, is the control: what the two differ by is noise. Each side has an engine of its own, so
    that all find the processor's caches equally cold.
    """
    result = Result(f"telemetry {shape.name if shape else ours.EMBEDDED}")
    engines = {
        name: ours.load(shape, seed, 1, telemetry=name == "on", max_batch_size=1, kv_cache_max_slots=512)
        for name in ("on", "off", "control")
    }
    vocabulary = engines["on"].describe()["vocab"]
    prompt = np.random.default_rng(seed).integers(3, vocabulary, 32).tolist()

    def side(name: str) -> Block:
        return ours.decode(engines[name], prompt, tokens)[1]

    try:
        sides = {"off": lambda: side("off"), "on": lambda: side("on"), "control": lambda: side("control")}
        interleave(2, sides)  # warm up
        blocks = interleave(rounds, sides)
    finally:
        for engine in engines.values():
            engine.close()
    took = {name: percentile([b.cpu_s / b.work for b in found], QUARTER) for name, found in blocks.items()}
    off = (took["off"] + took["control"]) / 2
    noise = abs(took["off"] - took["control"]) / off * 100
    result.add("decode, telemetry on, CPU time", 1 / took["on"], "tokens/s", peer="telemetry off", peer_value=1 / off)
    result.add("cost of telemetry", max((took["on"] / off - 1) * 100, 0.0), "% of decode", limit=BAR)
    result.add("cost of telemetry", (took["on"] - off) * 1e6, "us a token")
    result.add("control: off against off", noise, "% of decode", limit=CONTROL)
    if noise > CONTROL:
        result.reasons.append(f"two sides without telemetry differ by {noise:.1f} %")
    return result
