"""What can happen while the engine runs, as NumPy record dtypes. Times are nanoseconds of time.perf_counter_ns()."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Phase(IntEnum):
    PREFILL = 0
    DECODE = 1


class PageKind(IntEnum):
    FAULT = 0  # read because a step needed it
    EVICT = 1
    PREFETCH = 2  # asked for, and there already since it was guessed
    PIN = 3
    UNPIN = 4
    WASTE = 5  # guessed and read, and thrown away before anybody asked for it
    SENT = 6  # from the host's memory to the GPU's, `pages` of 64 KiB
    LEFT = 7  # the GPU's memory has it no more


class SlotKind(IntEnum):
    ALLOC = 0
    FREE = 1
    PAIR = 2  # taken as one of two at once, by one of the most used experts


class SequenceKind(IntEnum):
    START = 0
    FINISH = 1  # reason in `detail`: 0 length, 1 end token, 2 stop text, 3 cancelled, 4 error


# One per row that the engine forwarded (prompt rows too). Stage times are the step's, divided by its rows.
TOKEN = np.dtype(
    [
        ("t_ns", "u8"),  # end of the step
        ("sequence", "u4"),
        ("position", "u4"),
        ("token", "i4"),  # id sampled from this row, -1 where none was (inner prompt rows)
        ("phase", "u1"),
        ("rows", "u2"),  # rows of the step
        ("latency_ns", "u8"),  # prefill: step time / rows; decode: the step's time
        ("attention_ns", "u4"),  # attn_router calls without the router
        ("router_ns", "u4"),  # logits and choice
        ("dispatch_ns", "u4"),  # from the choice to the experts' kernel: key places, the pager's books, rows by expert
        ("io_ns", "u4"),  # waiting for expert pages
        ("experts_ns", "u4"),  # expert_ffn calls without waiting and grouping
        ("head_ns", "u4"),  # head and sampling
        ("faults", "u2"),  # experts read for the step / hits / evicted; whole step, written on its last row, else 0
        ("hits", "u2"),
        ("evictions", "u2"),
        ("bytes_read", "u8"),
    ]
)
PAGES = np.dtype(
    [
        ("t_ns", "u8"),
        ("kind", "u1"),
        ("layer", "u2"),
        ("expert", "u2"),
        ("pages", "u2"),
        ("wait_ns", "u4"),
        ("step", "u4"),
    ]
)
SLOT = np.dtype([("t_ns", "u8"), ("kind", "u1"), ("slot", "u4"), ("sequence", "u4"), ("layer", "u2"), ("owner", "i4")])
SEQUENCE = np.dtype([("t_ns", "u8"), ("kind", "u1"), ("sequence", "u4"), ("prompt_tokens", "u4"), ("detail", "u1")])
# The engine's counters at one moment; the names of the columns stand beside the samples, NaN where there is no value.
GAUGES = 192  # most columns
GAUGE = np.dtype([("t_ns", "u8"), ("value", "f8", (GAUGES,))])
# Beside each TOKEN row lie two arrays: route u2 [L, k] (experts, best first; 65535 in dense layers) and
# weight f2 [L, k], and slot i4 [L] (the KV slot that the row's keys went to in each layer).
NO_EXPERT = 65535
