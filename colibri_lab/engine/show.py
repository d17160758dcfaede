"""What an engine says of itself: facts as JSON values, one line, and a table."""

from __future__ import annotations

from html import escape
from typing import Any

from ..config import Config
from ..ops.cuda import CudaBackend
from ..ops.layout import PAGE
from ..ops.routing import COUNTS, QUANTISED, report
from ..pager.policies import policy_name
from .host import in_words

MIB = 1 << 20


def describe(parts: Any, config: Config) -> dict[str, Any]:
    spec, file, pager, kv = parts.file.spec, parts.file, parts.pager, parts.kv
    return {
        "model": file.source or file.path.parent.name.encode(errors="replace").decode(),
        "path": str(parts.file.path).encode(errors="replace").decode(),
        "family": spec.family,
        "layers": spec.layers,
        "sparse_layers": sum(spec.sparse),
        "experts": spec.experts,
        "top_k": parts.top_k,
        "model_top_k": spec.top_k,
        "hidden": spec.hidden_size,
        "vocab": spec.vocab_size,
        "quantize": file.quantize,
        "group": file.group,
        "backend": parts.backend.name,
        "isa": parts.backend.isa,
        "precision": parts.backend.precision,
        "threads": parts.threads,
        "why_backend": parts.why,
        "expert_bytes": file.expert_pages * PAGE,
        "experts_total_bytes": pager.most,
        "resident_bytes": file.resident_bytes,
        "expert_cache_bytes": pager.budget,
        "expert_cache_least_bytes": pager.least,
        "direct_io": parts.pager.direct,
        "reads": parts.pager.reads,
        "frames": pager.frames.capacity * pager.frames.pages,
        "expert_placement": config.expert_placement,
        "cuda_graphs": parts.transformer.whole.describe() if isinstance(parts.backend, CudaBackend) else "none: no GPU",
        "gpu_cache_bytes": b.tier.bytes if isinstance(b := parts.backend, CudaBackend) and b.tier else 0,
        "kv_slots": kv.slots.slots,
        "kv_slot_size": kv.slots.size,
        "kv_dtype": config.kv_cache_dtype,
        "attention": config.attention,
        "attention_recent": kv.pool.recent,
        "attention_sinks": kv.pool.sinks,
        "kv_bytes_per_token": spec.layers * 2 * spec.kv_heads * spec.head_dim * kv.pool.k.itemsize,
        "kv_persistence": parts.persistence.describe() if parts.persistence else {"state": "off"},
        "max_positions": parts.max_positions,
        "engine_mode": config.engine_mode,
        "router": parts.router.name if parts.router else parts.routing.kind,
        "router_quant_bits": parts.routing.bits if parts.routing.kind in QUANTISED else None,
        "router_dtype": config.router_dtype,
        "router_layers": report(parts.routing, spec.sparse),
        "changes": changes(parts, config),
        "prefetcher": policy_name(config.prefetcher or "none"),
        "eviction_policy": policy_name(config.eviction_policy),
        "settings_given": given(config),
        **parts.host.describe(file.path),
    }


def given(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, without the paths: JSON values, objects by their name."""
    plain = (type(None), bool, int, float, str)
    values = {name: getattr(config, name) for name in Config.model_fields if not name.endswith("_path")}
    return {
        name: value if isinstance(value, plain) else policy_name(value)
        for name, value in values.items()
        if value != Config.model_fields[name].default
    }


def changes(parts: Any, config: Config) -> list[str]:
    """What makes this another model than the file's, in words."""
    said = []
    if parts.top_k != parts.file.spec.top_k:
        said.append(f"router_top_k: {parts.top_k} experts a token instead of the model's {parts.file.spec.top_k}")
    if parts.rounded:
        said.append(f"router_dtype: {parts.rounded:,} router weights rounded to {config.router_dtype}")
    if parts.router is None and parts.routing.kind in ("int8_lut", "bit_level"):
        said.append(f"router: {parts.routing.kind} is approximate")
    if config.attention == "expert_local":
        near = f"the newest {parts.kv.pool.recent} and the first {parts.kv.pool.sinks}"
        said.append(f"attention: expert_local is approximate: a token sees those of its experts, {near}")
    return said


def routing_counts(parts: Any) -> dict[str, int]:
    """The router's counters over all layers; `rows` is what `selections` counts."""
    total = dict(zip(COUNTS, parts.routing.counts.sum(axis=0).tolist(), strict=True))
    total.pop("rows")
    return total | {"rounded_weights": parts.rounded}


def line(d: dict[str, Any]) -> str:
    cache = f"cache {d['expert_cache_bytes'] / MIB:.1f} of {d['experts_total_bytes'] / MIB:.1f} MiB"
    shape = f"{d['family']}, {d['layers']} layers, {d['experts']} experts, top-{d['top_k']}, {d['quantize']}"
    shape += "".join(f", changed by {change}" for change in d["changes"])
    return f"<Engine {d['model']}: {shape}, {d['backend']} ({d['isa']}), {cache}>"


def html(d: dict[str, Any], c: dict[str, dict[str, int | float]]) -> str:
    pager, kv, done = c["pager"], c["kv"], c["engine"]
    asked, everything = pager["hits"] + pager["faults"], d["experts_total_bytes"]
    found = f"of {asked:,} ({pager['faults']:,} faults, {pager['evictions']:,} evicted)"
    slots = f"of {kv['slots']:,} x {kv['slot_size']} tokens, {d['kv_dtype']}"
    each = f"{d['expert_bytes'] / MIB:.3g} MiB each, {d['quantize']}"
    rows = {
        "model": f"{d['model']}: {d['family']}, {d['layers']} layers, hidden {d['hidden']}, vocabulary {d['vocab']}",
        "experts": f"{d['experts']} a layer, top-{d['top_k']}, {each}",
        "runs on": f"{d['backend']} ({d['isa']}), {d['precision']}, {d['threads']} threads: {d['why_backend']}",
        "expert cache": _bar(d["expert_cache_bytes"], everything, f"of {everything / MIB:.1f} MiB of experts"),
        "requests found there": _bar(pager["hits"], asked, found),
        "KV slots": _bar(kv["slots_used"], kv["slots"], slots),
        **_attention_rows(d["attention"], kv),
        **_prefix_rows(d["kv_persistence"], c["persistence"]),
        "router": d["router"],
        **({"changed by": "; ".join(d["changes"])} if d["changes"] else {}),
        **_router_rows(c["router"]),
        **{f"warning {i}": text for i, text in enumerate(_warnings(d), 1)},
        **_machine_rows(d, c["batch"]),
        "forwarded": f"{done['prefill_tokens']:,} prompt tokens, {done['decode_tokens']:,} generated ones",
    }
    left = 'style="text-align:left"'
    cells = [
        f"<tr><th {left}>{escape(name)}</th><td {left}>{value if value.startswith('<svg') else escape(value)}</td></tr>"
        for name, value in rows.items()
    ]
    return f"<table><tbody>{''.join(cells)}</tbody></table>"


def _attention_rows(attention: str, kv: dict[str, int | float]) -> dict[str, str]:
    """What attention read so far, where it may read less than all."""
    if attention == "exact":
        return {}
    return {"attention read": _bar(kv["attention_bytes"], kv["attention_bytes_exact"], "of what exact attention reads")}


def _machine_rows(d: dict[str, Any], c: dict[str, int | float]) -> dict[str, str]:
    """What the process asks of the machine and how the batch size follows it, where it does."""
    rows = {"machine": said} if (said := in_words(d)) else {}
    if d["batch_follows"]:
        changes = f"{c['halvings']} halvings, {c['growths']} growths, {c['held']:,} times a request was held back"
        rows["batch size"] = f"at most {c['cap']} together now; {changes}; follows {d['batch_follows']}"
    return rows


def _prefix_rows(d: dict[str, Any], c: dict[str, int | float]) -> dict[str, str]:
    """What the folder of prefixes did, where there is one."""
    if d["state"] == "off":
        return {}
    did = f"{c['tokens_restored']:,} tokens restored, {c['prefixes_stored']:,} prefixes stored, {d['prefixes']:,} there"
    refused = "".join(f"; refused {file}: {why}" for file, why in d["refused"].items())
    return {"KV prefixes": f"{did}, {c['slots_spilled']:,} slots in files now ({d['reason'] or d['path']}){refused}"}


def _router_rows(c: dict[str, int | float]) -> dict[str, str]:
    """Certificates and the audit, where there are any."""
    rows, asked = {}, c["certified"] + c["fallback"]
    if c["certified"]:
        each = c["candidates"] / c["certified"]
        rows["rows certified"] = _bar(c["certified"], asked, f"of {asked:,}, {each:.3g} candidates each")
    elif c["fallback"]:
        rows["decided exactly"] = f"{c['fallback']:,} of {c['selections']:,} rows, where the fast way found no answer"
    if c["audited"]:
        rows["wrong selections"] = _bar(c["wrong_selections"], c["audited"], f"of {c['audited']:,} audited")
    return rows


def machine_counts(parts: Any) -> dict[str, dict[str, int]]:
    """Of the host, and of the GPU where one computes."""
    gpu: dict[str, int] = {}
    if isinstance(parts.backend, CudaBackend):
        gpu = parts.backend.counters() | parts.transformer.whole.counters() | parts.choosing.counters()
    return {"host": parts.host.counters(), "gpu": gpu}


def warnings(parts: Any) -> list[str]:
    """What is to be said of the routers' logits by layer, if anything."""
    return [str(layer["warning"]) for layer in report(parts.routing, parts.file.spec.sparse) if layer["warning"]]


def _warnings(d: dict[str, Any]) -> list[str]:
    return [layer["warning"] for layer in d["router_layers"] if layer["warning"]]


def _bar(part: float, whole: float, text: str) -> str:
    share = part / whole if whole else 0.0
    return (
        f'<svg width="120" height="12" role="img" aria-label="{share:.0%}"><rect width="120" height="12" fill="#8884"/>'
        f'<rect width="{120 * min(1.0, share):.1f}" height="12" fill="#0072b2"/></svg> {share:.0%} {escape(text)}'
    )
