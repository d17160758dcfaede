"""An engine without a model: seeded Zipf-Markov routing, LRU experts and KV slots, told to a real Telemetry."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np

from colibri_lab.config import Config
from colibri_lab.events import PageKind, Phase, SequenceKind, SlotKind
from colibri_lab.telemetry import Telemetry

WORDS = (
    "The colibri hovers over a sparse expert while memory pages drift past and the gate picks two more for the next "
    "word; nobody in the garden had seen so small a bird keep so large a library in its head. Every flower is a page, "
    "and the ones it visits most it never forgets."
).split()
MS = 1_000_000


class FakeSettings(SimpleNamespace):
    @property
    def config(self):
        return dict(vars(self))  # another object each time, as after a change


class FakeEngine:
    """Writes events as the real engine does; `rate` tokens/s is what it reaches when pace is off."""

    def __init__(self, layers=8, experts=16, top_k=2, expert_bytes=65536, slots=512, slot_size=64, seed=0, rate=400.0,
                 all_systems=False):  # fmt: skip
        self.layers, self.experts, self.top_k, self.expert_bytes = layers, experts, top_k, expert_bytes
        self.telemetry = Telemetry(layers, experts, top_k)
        self.slots, self.slot_size, self.rate = slots, slot_size, rate
        live = {name: Config.model_fields[name].default for name in Config.live_keys()}
        live["expert_cache_bytes"] = layers * experts * expert_bytes // 2
        self.settings = FakeSettings(**live)
        self.rng = np.random.default_rng(seed)
        zipf = 1.0 / np.arange(1, experts + 1) ** 1.1
        self.odds = np.stack([self.rng.permutation(zipf / zipf.sum()) for _ in range(layers)])
        self.memory: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.free = list(range(slots))[::-1]
        self.table: dict[tuple[int, int, int], list[int]] = {}
        self.last = self.route()
        self.next_sequence, self.step_number, self.closed, self.due_ns = 1, 0, False, 0
        self.all_systems, self.finished = all_systems, 0
        self.total = dict.fromkeys(("faults", "hits", "evictions", "decode_tokens", "prefill_tokens"), 0)

    def describe(self):
        total = self.layers * self.experts * self.expert_bytes
        facts = {"model": "fake-moe", "family": "fake", "layers": self.layers, "experts": self.experts}
        facts |= {
            "top_k": self.top_k,
            "hidden": 256,
            "vocab": 4096,
            "quantize": "int4",
            "backend": "fake",
            "isa": "none",
        }
        facts |= {"precision": "fast", "threads": 1, "expert_bytes": self.expert_bytes, "experts_total_bytes": total}
        facts |= {"expert_cache_bytes": self.settings.expert_cache_bytes, "kv_slots": self.slots}
        return facts | {
            "kv_slot_size": self.slot_size,
            "engine_mode": "sync",
            "router": "softmax",
            "max_positions": 1024,
        }

    def budget_bytes(self):
        return self.settings.expert_cache_bytes

    def counters(self):
        engine = {name: self.total[name] for name in ("decode_tokens", "prefill_tokens")} | {"steps": self.step_number}
        engine |= {"running": self.next_sequence - 1 - self.finished, "waiting": 0}
        pager = {name: self.total[name] for name in ("faults", "hits", "evictions")}
        pager |= {
            "budget_bytes": self.settings.expert_cache_bytes,
            "frames": self.frames,
            "experts_resident": len(self.memory),
        }
        made = invented(self.total, self.step_number, self.layers) if self.all_systems else {}
        return {
            "engine": engine,
            "telemetry": self.telemetry.counters(),
            **made,
            "pager": pager | made.get("pager", {}),
        }

    @property
    def frames(self):
        return self.settings.expert_cache_bytes // 65536

    def pages(self, layer, expert):
        return [7 if (layer, expert) in self.memory else -1] * (self.expert_bytes // 65536)

    def session(self):
        return FakeSession(self)

    def close(self):
        self.closed = True

    def route(self):
        picks = [self.rng.choice(self.experts, self.top_k, replace=False, p=row) for row in self.odds]
        return np.array(picks, "u2")

    def step(self, sequence, position, phase, t_ns=None):
        """One row through all layers; returns the step's time in ns."""
        stay = self.rng.random(self.layers) < 0.55
        self.last = route = np.where(stay[:, None], self.last, self.route()).astype("u2")
        t = time.perf_counter_ns() if t_ns is None else t_ns
        room = max(self.top_k, self.settings.expert_cache_bytes // self.expert_bytes)
        faults = hits = evictions = 0
        slot = np.zeros((1, self.layers), "i4")
        for layer in range(self.layers):
            for expert in route[layer].tolist():
                if (layer, expert) in self.memory:
                    hits += 1
                    self.memory.move_to_end((layer, expert))
                    continue
                faults += 1
                while len(self.memory) >= room:
                    old = self.memory.popitem(last=False)[0]
                    evictions += 1
                    self.telemetry.page(t, PageKind.EVICT, *old, 1, 0, self.step_number)
                self.memory[layer, expert] = None
                self.telemetry.page(t, PageKind.FAULT, layer, expert, 1, 60_000, self.step_number)
            slot[0, layer] = self.kv(t, sequence, layer, int(route[layer, 0]))
        parts = [int(v * MS) for v in (0.3 * self.rng.lognormal(0, 0.1), 0.03, 0.02, 0.06 * faults, 0.8, 0.12)]
        took = sum(parts) + int(0.1 * MS)
        if t >= self.due_ns:
            self.sample(t)
        end = time.perf_counter_ns() if t_ns is None else t_ns + took
        one, weight = np.array([1]), np.full((1, self.layers, self.top_k), 1 / self.top_k, "f2")
        token = -1 if phase == Phase.PREFILL else int(self.rng.integers(4096))
        ends = (one * sequence, one * position, one * token, phase, took, *parts)
        self.telemetry.step(end, *ends, faults, hits, evictions, faults * self.expert_bytes, route[None], weight, slot)
        self.step_number += 1
        for name, value in (("faults", faults), ("hits", hits), ("evictions", evictions)):
            self.total[name] += value
        self.total["prefill_tokens" if phase == Phase.PREFILL else "decode_tokens"] += 1
        return took

    def choices(self, sequence, position):
        words = [(i, f" {WORDS[(position + i) % len(WORDS)]}", -0.5 - i) for i in range(5)]
        self.telemetry.logprobs(sequence, position, words[position % 5], words[: self.settings.telemetry_top_logprobs])

    def sample(self, t_ns):
        self.due_ns = t_ns + 100 * MS
        self.telemetry.gauges(t_ns, self.counters())

    def snapshot(self, t_ns=None):
        slots = [[slot, s, layer, owner, held[1] if slot == held[0] else self.slot_size]
                 for (s, layer, owner), held in self.table.items() for slot in held[2:]]  # fmt: skip
        resident = [layer * self.experts + expert for layer, expert in self.memory]
        self.telemetry.note("snapshot", {"resident": resident, "pinned": [], "slots": slots}, t_ns)

    def kv(self, t, sequence, layer, owner):
        key = (sequence, layer, owner)
        held = self.table.setdefault(key, [])
        if not held or held[1] % self.slot_size == 0:
            if not self.free:
                return held[0] if held else -1
            taken = self.free.pop()
            self.telemetry.slot(t, SlotKind.ALLOC, taken, sequence, layer, owner)
            self.table[key] = held = [taken, 0, *held[2:], taken]
        held[1] += 1
        return held[0]

    def start(self, prompt_tokens, t_ns=None):
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        t = time.perf_counter_ns() if t_ns is None else t_ns
        self.telemetry.sequence(t, SequenceKind.START, sequence, prompt_tokens)
        return sequence

    def finish(self, sequence, detail=0, t_ns=None):
        t = time.perf_counter_ns() if t_ns is None else t_ns
        for key in [key for key in self.table if key[0] == sequence]:
            for slot in self.table.pop(key)[2:]:
                self.telemetry.slot(t, SlotKind.FREE, slot, sequence, key[1], key[2])
                self.free.append(slot)
        self.telemetry.sequence(t, SequenceKind.FINISH, sequence, 0, detail)
        self.finished += 1
        self.sample(t)

    def run(self, tokens, prompt_tokens=7, t_ns=1_000_000_000):
        """A whole generation on an invented clock, without waiting; returns the clock's end."""
        sequence = self.start(prompt_tokens, t_ns)
        for position in range(prompt_tokens + tokens):
            phase = Phase.PREFILL if position < prompt_tokens else Phase.DECODE
            t_ns += self.step(sequence, position, phase, t_ns) + 50_000
            if phase == Phase.DECODE:
                self.telemetry.text(sequence, position + 1, " " + WORDS[position % len(WORDS)])
                if self.settings.telemetry_top_logprobs:
                    self.choices(sequence, position + 1)
        self.finish(sequence, 0, t_ns)
        return t_ns


class FakeSession:
    """start, pause, resume, stop, join, close, as the engine's session."""

    def __init__(self, engine):
        self.engine, self.state, self.text, self.tokens, self.error = engine, "idle", "", [], None
        self.sequence = None
        self._go, self._halt, self._thread = threading.Event(), False, None

    def start(self, prompt, max_tokens=128, **_):
        self.stop()
        self.join(5)
        self.text, self.tokens, self._halt, self.state = "", [], False, "generating"
        self._go.set()
        self.sequence = self.engine.start(len(str(prompt).split()) + 1)
        self._thread = threading.Thread(target=self._run, args=(len(str(prompt).split()) + 1, max_tokens), daemon=True)
        self._thread.start()

    def _run(self, prompt_tokens, max_tokens):
        engine, sequence = self.engine, self.sequence
        try:
            for position in range(prompt_tokens + max_tokens):
                self._go.wait()
                if self._halt:
                    break
                phase = Phase.PREFILL if position < prompt_tokens else Phase.DECODE
                took = engine.step(sequence, position, phase)
                if phase == Phase.DECODE:
                    piece = " " + WORDS[position % len(WORDS)]
                    self.text += piece
                    self.tokens.append(piece)
                    engine.telemetry.text(sequence, position + 1, piece)
                time.sleep(1 / engine.settings.pace if engine.settings.pace else max(1 / engine.rate, took / 1e9))
        except Exception as error:
            self.error = error
            self.state = "error"
            return
        engine.finish(sequence, 3 if self._halt else 0)
        self.state = "idle"

    def pause(self):
        if self.state == "generating":
            self._go.clear()
            self.state = "paused"

    def resume(self):
        if self.state == "paused":
            self.state = "generating"
            self._go.set()

    def stop(self):
        self._halt = True
        self._go.set()

    def join(self, timeout=None):
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self):
        self.stop()
        self.join(5)

    def set(self, name, value):
        setattr(self.engine.settings, name, value)
        self.engine.telemetry.note("settings", {name: value})


def invented(total, steps, layers):
    """Counters as an engine with every system switched on would have them, from what the fake one counted."""
    rows, hits = steps * layers, total["hits"]
    pager = {"pin_hits": hits // 5, "prefetch_hits": hits // 4, "policy_hits": hits - hits // 5 - hits // 4}
    pager |= {"pinned": 3, "prefetch_issued": hits // 3, "prefetch_late": hits // 20, "prefetch_wasted": hits // 30}
    pager |= {"early_issued": hits // 40, "early_useful": hits // 50}
    pager |= {"bytes_read": total["faults"] * 65536, "io_wait_s": total["faults"] * 6e-5}
    router = {"selections": rows, "certified": rows * 9 // 10, "fallback": rows - rows * 9 // 10}
    router |= {"candidates": rows * 9 // 10 * 3, "audited": rows, "wrong_selections": rows // 100}
    dispatch = {"rows": 2 * rows, "waves": rows, "bytes_copied": 0, "units": rows, "ring_switches": rows // 4}
    dispatch |= {"ring_a_filled": 0.3 * rows, "ring_a_units": rows / 2, "ring_b_filled": 0.2 * rows}
    dispatch |= {"ring_b_units": rows / 2, "watermark": 0.75, "stalls": steps // 7, "frame_stalls": steps // 50}
    dispatch |= {"reads_hidden": total["faults"] * 3 // 4, "reads_arriving": total["faults"] - total["faults"] * 3 // 4}
    batch = {"cap": 8 if steps % 900 < 600 else 4, "memory_permille": 800, "idle_permille": 250}
    batch |= {"halvings": steps // 900, "growths": 0, "held": 0}
    kv = {"slots": 2048, "slots_used": steps % 2048, "slots_peak": min(steps, 2048), "slot_size": 256}
    kv |= {"double_slots": 9, "base_slots": 4, "promotions": 2}
    kv |= {"attention_bytes": 700 * rows, "attention_bytes_exact": 1000 * rows}
    saved = {"slots_spilled": steps // 50, "tokens_restored": rows // 9, "prefixes_stored": 3, "prefixes_restored": 1}
    gpu = {"experts_hits": rows, "experts_faults": total["faults"], "experts_ahead": hits // 9, "experts_resident": 9}
    gpu |= {
        "picks_gpu": 2 * rows,
        "picks_cpu": rows // 5,
        "sent_bytes": total["faults"] << 16,
        "read_bytes": 400 * steps,
    }
    gpu |= {"sends": 2 * total["faults"], "send_waits": total["faults"] // 3, "device_bytes": 1 << 30}
    gpu |= {"graphs_captured": 2, "graph_replays": steps * 3 // 4, "steps_without_graph_prompt": steps // 9}
    gpu |= {"steps_without_graph_batch": 0, "steps_without_graph_experts": 4, "steps_without_graph_settings": 0}
    gpu |= {"tokens_chosen": steps * 3 // 4}
    made = {"pager": pager, "router": router, "dispatch": dispatch, "batch": batch, "kv": kv, "persistence": saved}
    return made | {"gpu": gpu}
