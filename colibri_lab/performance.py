"""What a generation took, as figures and as one line; and what a person wants to know before its first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from colibri_lab.engine.host import in_words

MIB = 1 << 20


def performance(
    begin: float, times: Sequence[float], latencies: Sequence[float], counters: Mapping[str, Any]
) -> dict[str, Any]:
    """Figures of one generation. times: when each token came, seconds of one clock that said `begin` at the start.

    latencies: milliseconds of each token; of the first one, the time until it came. Percentiles are interpolated as on
    the board, over all but the first. counters: the engine's, afterwards.
    """
    n = len(times)
    rest = list(latencies[1:]) or list(latencies) or [0.0]
    at = {f"p{p}": round(float(np.percentile(rest, p)), 3) for p in (50, 95, 99)}
    span = times[-1] - times[0] if n > 1 else (times[-1] - begin if n else 0.0)
    return {
        "tokens": n,
        "ttft_ms": round((times[0] - begin) * 1e3, 3) if n else 0.0,
        "ms_per_token": at,
        "tokens_per_s": round(max(n - 1, 1) / span, 2) if span > 0 else 0.0,
        "counters": dict(counters),
    }


def performance_line(result: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The final line of a generation; pager figures are its share, `before` being the counters at its start."""
    pager, earlier, ms = result["counters"]["pager"], before["pager"], result["ms_per_token"]
    faults, hits, size = (pager[key] - earlier[key] for key in ("faults", "hits", "bytes_read"))
    rate = 100 * hits / (hits + faults) if hits + faults else 100.0
    return (
        f"{result['tokens']} tokens, first after {result['ttft_ms']:.1f} ms, "
        f"ms/token P50 {ms['p50']:.2f} P95 {ms['p95']:.2f} P99 {ms['p99']:.2f}, "
        f"{result['tokens_per_s']:.1f} tokens/s, {faults} faults, hit rate {rate:.1f} %, {size / MIB:.1f} MiB read"
    )


def facts(d: Mapping[str, Any], settings: Any) -> list[tuple[str, str]]:
    """(what, fact) of an engine's description and live settings."""
    cache, everything = d["expert_cache_bytes"], d["experts_total_bytes"]
    whole = " (all experts)" if cache == everything else ""
    reads = "past the page cache (O_DIRECT)" if d["direct_io"] else "buffered, dropped from the page cache"
    frames = f"{d['frames']} frames, {d['eviction_policy']}, reads {reads}"
    sizes = f"{d['layers']} layers, hidden {d['hidden']}, vocabulary {d['vocab']}, {d['quantize']}"
    batch = f"up to {settings.max_batch_size} sequences, {settings.prefill_chunk} prompt tokens a step"
    if (every := settings.batch_adapt_interval_ms) is not None:
        batch += f", fewer when memory is tight (a look every {every} ms)"
    slots = f"{d['kv_slots']} slots x {d['kv_slot_size']} tokens, {d['kv_dtype']}"
    prefixes = d["kv_persistence"]
    stored = "" if prefixes["state"] == "off" else f", {prefixes['prefixes']} prefixes in {prefixes['path']}"
    return [
        ("model", f"{d['model']}: {d['family']}, {sizes}"),
        ("router", f"{d['router']}, top-{d['top_k']} of {d['experts']} experts"),
        ("pager", f"{cache / MIB:.1f} of {everything / MIB:.1f} MiB{whole}, {frames}"),
        ("kv", f"{slots}, context {d['max_positions']}{stored}"),
        ("mode", f"{d['engine_mode']}, {batch}"),
        ("backend", f"{d['backend']} ({d['isa']}), {d['precision']}, {d['threads']} threads: {d['why_backend']}"),
        *([("host", host)] if (host := in_words(d)) else []),
    ]
