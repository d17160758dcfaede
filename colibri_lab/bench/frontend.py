"""A real kernel and a front end that receives: what a page and its server do with messages, short of drawing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jupyter_client.manager import KernelManager

LOOK_S = 2.0  # a page says this often that it still shows the board
QUIET = ["--HistoryManager.enabled=False", "--log-level=ERROR"]


@dataclass
class Received:
    """What arrived of one widget since it was opened: frames, messages of all its kinds, and their bytes."""

    frames: int = 0
    messages: int = 0
    bytes: int = 0
    open: bool = True


@dataclass
class Frontend:
    """Runs cells in a kernel of its own and takes every message off the wire; close() ends the kernel.

    Messages are serialised, signed, sent, received and parsed as between ipykernel and a Jupyter server. The browser's
    share, that is parsing and drawing in a process of its own, is not in it.
    """

    boards: dict[str, Received] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="colibri-bench-")
        env = os.environ | {"IPYTHONDIR": self._folder.name, "OMP_NUM_THREADS": "1"}
        self._kernel = KernelManager(connection_file=str(Path(self._folder.name) / "kernel.json"))
        self._kernel.start_kernel(env=env, extra_arguments=QUIET)
        self._client = self._kernel.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self._looked = 0.0

    def run(self, code: str, seconds: float = 600) -> Any:
        """Runs a cell whose last printed line is JSON, and returns that; ValueError with the cell's own error."""
        asked = self._client.execute(code, store_history=False, stop_on_error=False)
        said, end = "", time.monotonic() + seconds
        while time.monotonic() < end:
            self._look()
            message = self._receive()
            content = {} if message is None else message["content"]
            if message is None or message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said += content["text"]
            elif message["msg_type"] == "error":
                raise ValueError(f"in the kernel: {content['ename']}: {content['evalue']}")
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return json.loads(said.strip().splitlines()[-1])
        raise ValueError(f"the kernel did not answer within {seconds:.0f} s")

    def _receive(self) -> dict[str, Any] | None:
        socket = self._client.iopub_channel.socket
        if not socket.poll(250):
            return None
        parts = socket.recv_multipart()
        message: dict[str, Any] = self._client.session.deserialize(self._client.session.feed_identities(parts)[1])
        self._count(message, sum(map(len, parts)))
        return message

    def _count(self, message: dict[str, Any], size: int) -> None:
        content, kind = message["content"], message["msg_type"]
        if kind == "comm_open" and "_esm" in content["data"].get("state", {}):
            self.boards[content["comm_id"]] = Received()
            self._tell(content["comm_id"], "hello")
        elif (board := self.boards.get(content.get("comm_id", ""))) is None:
            return
        elif kind == "comm_msg":
            board.messages, board.bytes = board.messages + 1, board.bytes + size
            board.frames += ["frame"] in content["data"].get("buffer_paths", [])
        elif kind == "comm_close":
            board.open = False

    def _look(self) -> None:
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            for comm in [comm for comm, board in self.boards.items() if board.open]:
                self._tell(comm, "look")

    def _tell(self, comm: str, what: str) -> None:
        data = {"method": "custom", "content": {"do": what}}
        message = self._client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        self._client.shell_channel.send(message)

    def close(self) -> None:
        """Ends the kernel; idempotent."""
        if self._kernel.has_kernel:
            self._client.stop_channels()
            self._kernel.shutdown_kernel(now=True)
        self._folder.cleanup()

    def __enter__(self) -> Frontend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
