"""Interrupting a cell in a real Jupyter kernel: the interrupt arrives, partial text stays, the next cell is clean."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

SLOW = "for token in engine.generate('The sea', max_tokens=900):\n    print(token.text, end='', flush=True)"


@pytest.fixture
def kernel() -> Iterator[tuple[Any, Any]]:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: Any, code: str, interrupt: Any = None) -> tuple[str, str, float]:
    """(printed, error name, seconds from interrupt to reply) of a cell; interrupt() is called at its first output."""
    printed: list[str] = []
    pressed = [0.0]

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])
            if interrupt is not None and not pressed[0]:
                pressed[0] = time.monotonic()
                interrupt()

    reply = client.execute_interactive(code, output_hook=output, timeout=60)
    return "".join(printed), reply["content"].get("ename", ""), time.monotonic() - pressed[0]


def test_interrupt_in_a_cell(model: Path, kernel: tuple[Any, Any]) -> None:
    manager, client = kernel
    load = f"""
import threading
from colibri_lab import Engine
engine = Engine.load({str(model)!r}, threads=1, pace=50, expert_cache_bytes='1MiB')
expected = [t.id for t in engine.generate('A', max_tokens=4)]
before = sorted(t.name for t in threading.enumerate())
"""
    assert run(client, load)[:2] == ("", "")

    def twice() -> None:
        manager.interrupt_kernel()
        time.sleep(0.01)
        manager.interrupt_kernel()

    for press in (manager.interrupt_kernel, twice):
        text, error, took = run(client, SLOW, press)
        assert error == "KeyboardInterrupt" and took < 10 and 0 < len(text) < 500
        printed, error, _ = run(client, "print('x', [t.id for t in engine.generate('A', max_tokens=4)] == expected)")
        assert (printed, error) == ("x True\n", "")
    printed, error, _ = run(client, "print(before == sorted(t.name for t in threading.enumerate()))")
    assert (printed, error) == ("True\n", "")
    asynchronous = """
import asyncio
async def some():
    return [t.id for t in engine.generate('A', max_tokens=4)]
results = []
for _ in range(2):
    thread = threading.Thread(target=lambda: results.append(asyncio.run(some())))
    thread.start()
    thread.join()
print(results == [expected, expected])
"""
    assert run(client, asynchronous)[:2] == ("True\n", "")
