"""What `bench dashboard` runs inside the kernel: a lab that is shown, beside the engine that it shows."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from IPython.display import display

from colibri_lab.bench import ours
from colibri_lab.bench.harness import Block
from colibri_lab.bench.shapes import SHAPES, Shape
from colibri_lab.engine.engine import Engine
from colibri_lab.view.run import RunView
from colibri_lab.widgets.dashboard import Lab, connect

WIDE = Shape("wide", 256, 32, 64, 4, 128, 4, 2, 64)
EVERYTHING = dict(engine_mode="async", prefetcher="next_gate", router="two_stage", router_audit=True)
EVERYTHING |= dict(pin_after_tokens=6, kv_cache_slot_size=64, kv_cache_max_slots=2048, max_batch_size=4)
STEPS = 32  # of the time line
WRITTEN, DECODED, GIVEN = 150, 64, 16  # tokens of a request beside others, of one alone, of each prompt


class Bench:
    """One engine; `costs` looks at the board alone, `round_` at decode with and without it."""

    def __init__(self, shape: str, threads: int, hz: float, everything: bool) -> None:
        chosen = None if shape == ours.EMBEDDED else WIDE if shape == WIDE.name else SHAPES[shape]
        settings = EVERYTHING if everything else dict(max_batch_size=1, kv_cache_max_slots=512)
        self.engine: Engine = ours.load(chosen, 0, threads, **settings)
        self._hz, self._lab = hz, None
        about = self.engine.describe()
        if everything:
            self.engine.settings.expert_cache_bytes = about["experts_total_bytes"] // 2
        self._prompt = np.random.default_rng(0).integers(3, about["vocab"], GIVEN).tolist()
        say({"layers": about["layers"], "experts": about["experts"], "top_k": about["top_k"]})

    def costs(self, seconds: float, pace: float | None = None, watch: bool = False) -> None:
        """CPU seconds of each thread that takes part in an update, and how many updates there were."""
        self.engine.settings.pace = pace
        with self._shown() as lab, self._requests(lab):
            time.sleep(1)
            before, updates, decoded, begin = spent(lab), lab.board.updates, lab.view.timeline.decoded, time.monotonic()
            while time.monotonic() - begin < seconds:
                if watch:
                    lab.board._handle_custom_msg({"do": "watch"}, [])
                time.sleep(0.25)
            took = time.monotonic() - begin
            after, updates = spent(lab), lab.board.updates - updates
            decoded, missed = lab.view.timeline.decoded - decoded, lab.view.missing
        cpu = {name: after[name] - before[name] for name in before}
        say({"seconds": took, "updates": updates, "cpu_s": cpu, "tokens_per_s": decoded / took, "missed": missed})

    def replayed(self, rest: float, pictures: int) -> None:
        """CPU seconds of each thread for updates one after the other: each of 1/hz s of a run that was just shown.

        rest: seconds before each in which this process does nothing.
        """
        with self._shown() as lab:
            with self._requests(lab):
                time.sleep(pictures / self._hz + 2)
            lab.board._ticker.stop()
            source, state = lab.past.events(), lab.board._state
            cursor, view = source.cursor(), RunView(source.layers, source.experts, source.top_k, lab.view.about)
            now = source.end_ns - int(1e9 * (pictures + 1) / self._hz)

            def feed() -> int:
                before = view.events
                view.take(source.read_until(cursor, now))
                return view.events - before

            lab.board._feed, lab.board._state = feed, lambda: state() | {"state": "replay"}
            lab.board.show(view)
            lab.board.tick()
            took, told, updates, begun = [], spent(lab), lab.board.updates, view.events
            for _ in range(pictures):
                now += int(1e9 / self._hz)
                time.sleep(rest)
                begin = time.thread_time()
                lab.board.tick()
                took.append(time.thread_time() - begin)
            time.sleep(0.2)
            cpu = {name: seconds - told[name] for name, seconds in spent(lab).items()}
        cpu["ticker"] = statistics.median(took) * len(took)
        say({"cpu_s": cpu, "updates": lab.board.updates - updates, "events": view.events - begun})

    def travel(self, seconds: float) -> None:
        """CPU ms of this thread to show an earlier token, picture included: steps one by one, and jumps."""
        self.engine.settings.pace = None
        with self._shown() as lab:
            with self._requests(lab):
                time.sleep(seconds)
            first, last = lab.past.first, lab.past.last
            begin = time.thread_time()
            lab.seek(-1)
            once = time.thread_time() - begin
            steps = [_took(lab.step, -1) for _ in range(STEPS)]
            jumps = [_took(lab.seek, first + (last - first) * (i * 7 % STEPS) // STEPS) for i in range(STEPS)]
        say({"tokens": last - first + 1, "first_ms": 1000 * once, "step_ms": steps, "jump_ms": jumps})

    def block(self, board: bool, seconds: float) -> None:
        """Decode for so long in a thread of its own, with a board that is shown or without one."""
        if board:
            with self._shown() as lab:
                time.sleep(0.3)
                before, updates = spent(lab), lab.board.updates
                block = self._decode(seconds)
                cpu = sum(spent(lab).values()) - sum(before.values())
                extra = {"updates": lab.board.updates - updates, "board_cpu_s": cpu}
        else:
            block, extra = self._decode(seconds), {}
        say({"work": block.work, "wall_s": block.wall_s, "cpu_s": block.cpu_s, "delay_s": block.delay_s} | extra)

    def _decode(self, seconds: float) -> Block:
        def again() -> Block:
            block = Block()
            while block.wall_s < seconds:
                block.add(ours.decode(self.engine, self._prompt, DECODED)[1])
            return block

        with ThreadPoolExecutor(1) as one:
            return one.submit(again).result()

    @contextmanager
    def _shown(self) -> Iterator[Lab]:
        with connect(self.engine, self._hz) as lab:
            display(lab)  # type: ignore[no-untyped-call]
            yield lab

    @contextmanager
    def _requests(self, lab: Lab) -> Iterator[None]:
        """The lab's own generation and three others beside it, again and again."""
        end = threading.Event()

        def again() -> None:
            while not end.is_set():
                for _ in self.engine.generate(self._prompt, max_tokens=WRITTEN):
                    if end.is_set():
                        break

        def again_in_the_lab() -> None:
            while not end.is_set():
                lab.generate(self._prompt, max_tokens=WRITTEN)
                while lab.state == "generating" and not end.wait(0.05):
                    pass

        threads = [threading.Thread(target=run) for run in (again_in_the_lab, again, again, again)]
        for thread in threads:
            thread.start()
        yield
        end.set()
        lab.stop()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        self.engine.close()
        say({})


def _took(act: Callable[..., Any], *given: int) -> float:
    begin = time.thread_time()
    act(*given)
    return 1000 * (time.thread_time() - begin)


def spent(lab: Lab) -> dict[str, float]:
    """CPU seconds so far of the ticker, of ipykernel's sender, and of the message library's own threads."""
    from ipykernel.kernelapp import IPKernelApp

    told = {"ticker": 0.0, "sender": 0.0, "message library": 0.0}
    mine: dict[int | None, str] = {lab.board._ticker._thread.native_id: "ticker"}
    mine[IPKernelApp.instance().iopub_thread.thread.native_id] = "sender"
    for task in Path("/proc/self/task").iterdir():
        try:
            name, ran = (task / "comm").read_text(), int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # the thread has just ended
            continue
        part = "message library" if name.startswith("ZMQbg") else mine.get(int(task.name))
        if part is not None:
            told[part] += ran
    return told


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what))
