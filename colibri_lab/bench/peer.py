"""Our end of a peer process: start it in its own interpreter, ask, wait, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench.harness import Block
from colibri_lab.bench.shapes import Shape

PEERS = ("none", "llama.cpp")


class PeerError(RuntimeError):
    """The peer is not installed or failed; one line with the way out."""


class LlamaPeer:
    """llama.cpp in a child process (`llama_child.py`), with its default settings unless told otherwise.

    python: the interpreter that has llama-cpp-python and gguf; default COLIBRI_PEER_PYTHON, else ours.
    """

    name = "llama.cpp"

    def __init__(self, python: str | None = None) -> None:
        self.python = python or os.environ.get("COLIBRI_PEER_PYTHON") or sys.executable
        top = str(Path(__file__).resolve().parents[2])
        # our folder comes last on the child's path, so that its own packages win
        program = f"import sys; sys.path.append({top!r}); from colibri_lab.bench.llama_child import main; main()"
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._child = subprocess.Popen(
                [self.python, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"the peer's interpreter {self.python} does not start: {error.strerror}") from None
        self.settings = ""

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """One request, one answer; PeerError carries the child's own words."""
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(json.dumps({"op": op, **request}) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            words = self._last_words()
            if "ModuleNotFoundError" in words:
                raise self._missing(words)
            raise PeerError(f"llama.cpp's process in {self.python} ended: {words}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("missing"):
            raise self._missing(answer["error"])
        if "error" in answer:
            raise PeerError(f"llama.cpp: {answer['error']}")
        return answer

    def _missing(self, words: str) -> PeerError:
        return PeerError(
            f"{self.python} has no llama-cpp-python and gguf ({words}): pip install 'colibri-lab[peers]', "
            "or name an interpreter that has them with --peer-python or COLIBRI_PEER_PYTHON"
        )

    def _last_words(self) -> str:
        code = self._child.wait()
        if code in (-signal.SIGILL, -signal.SIGSEGV):
            return (
                f"{signal.Signals(-code).name}. Some virtual machines name AMX among their instructions and refuse it: "
                "build llama-cpp-python with CMAKE_ARGS=\"-DCMAKE_C_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16' "
                "-DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'\""
            )
        self._errors.seek(0)
        return " ".join(self._errors.read().strip().splitlines()[-1:]) or f"exit code {code}"

    def load(self, shape: Shape, seed: int, folder: Path, threads: int, repack: bool = True, mmap: bool = True) -> None:
        """Make the GGUF once in `folder`, then load it."""
        path = folder / f"{shape.name}-{seed}.gguf"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.ask("make", shape=asdict(shape), seed=seed, path=str(path))
        answer = self.ask("load", path=str(path), threads=threads, repack=repack, mmap=mmap, context=shape.positions)
        self.settings = answer["settings"]

    def decode(self, prompt: list[int], tokens: list[int]) -> tuple[Block, Block]:
        """(prompt, decode): the same tokens that we had, one at a time."""
        answer = self.ask("decode", prompt=prompt, tokens=tokens)
        steps = [Block(1, *step) for step in answer["steps"]]
        total = Block()
        for step in steps:
            total.add(step)
        return Block(len(prompt), *answer["prompt"]), total

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """float32 [V] after the last token."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits.npy"
            self.ask("logits", tokens=tokens, path=str(path))
            return np.asarray(np.load(path), np.float32)

    def close(self) -> None:
        """Let the child end; kill it when it does not."""
        if self._child.poll() is None:
            try:
                self._child.communicate('{"op": "close"}\n', timeout=10)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self._child.kill()
                self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._errors):
            if pipe:
                with suppress(BrokenPipeError):  # a child that died left something unread
                    pipe.close()

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
