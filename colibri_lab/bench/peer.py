"""Our end of a peer process: start it in its own interpreter, ask, wait, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from colibri_lab.bench.compiled import environment
from colibri_lab.bench.harness import Block
from colibri_lab.bench.peer_level import told
from colibri_lab.bench.shapes import Shape

PEERS = ("none", "llama.cpp", "transformers")
AMX_OFF = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class PeerError(RuntimeError):
    """The peer is not installed or failed; one line with the way out."""


class Peer:
    """A child process in the interpreter that has the peer: `python`, else COLIBRI_PEER_PYTHON, else ours.

    `variables` join its environment.
    """

    name = module = needs = extra = ""  # needs: what the interpreter must have; extra: of ours that brings it

    def __init__(self, python: str | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.python = python or os.environ.get("COLIBRI_PEER_PYTHON") or sys.executable
        top = str(Path(__file__).resolve().parents[2])
        # our folder comes last on the child's path, so that its own packages win
        program = f"import sys; sys.path.append({top!r}); from {self.module} import main; main()"
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._child = subprocess.Popen(
                [self.python, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment() | dict(variables or {}),
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"the peer's interpreter {self.python} does not start: {error.strerror}") from None
        self.settings = ""

    @property
    def pid(self) -> int:
        return self._child.pid

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
            raise PeerError(f"{self.name}'s process in {self.python} ended: {words}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("missing"):
            raise self._missing(answer["error"])
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def _missing(self, words: str) -> PeerError:
        return PeerError(
            f"{self.python} has no {self.needs} ({words}): pip install 'colibri-lab[{self.extra}]', "
            "or name an interpreter that has them with --peer-python or COLIBRI_PEER_PYTHON"
        )

    def _last_words(self) -> str:
        code = self._child.wait()
        if code in (-signal.SIGILL, -signal.SIGSEGV):
            return (
                f"{signal.Signals(-code).name}. Some virtual machines name AMX among their instructions and refuse it: "
                f"build llama-cpp-python with CMAKE_ARGS=\"-DCMAKE_C_FLAGS='{AMX_OFF}' -DCMAKE_CXX_FLAGS='{AMX_OFF}'\""
            )
        self._errors.seek(0)
        return " ".join(self._errors.read().strip().splitlines()[-1:]) or f"exit code {code}"

    def decode(self, prompt: list[int], tokens: list[int]) -> tuple[Block, Block]:
        """(prompt, decode): the same tokens that we had, one at a time."""
        answer = self.ask("decode", prompt=prompt, tokens=tokens)
        return Block(len(prompt), *answer["prompt"]), _sum(answer["steps"])

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LlamaPeer(Peer):
    """llama.cpp (`llama_child.py`), with its default settings unless told otherwise."""

    name, module, needs, extra = "llama.cpp", "colibri_lab.bench.llama_child", "llama-cpp-python and gguf", "peers"

    def __init__(self, python: str | None = None, repack: bool = True, mmap: bool = True) -> None:
        super().__init__(python)
        self._how = {"repack": repack, "mmap": mmap}

    def load(self, shape: Shape, seed: int, folder: Path, threads: int, sequences: int = 1) -> None:
        """Make the GGUF once in `folder`, then load it, with room for `sequences` of the shape's positions."""
        path = self.file(shape, seed, folder)
        answer = self.ask("load", path=str(path), threads=threads, context=shape.positions, sequences=sequences,
                          **self._how)  # fmt: skip
        self.settings = answer["settings"]

    def file(self, shape: Shape, seed: int, folder: Path) -> Path:
        """The shape's GGUF in `folder`, made now if it is not there."""
        path = folder / f"{shape.name}-{seed}.gguf"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self.ask("make", shape=asdict(shape), seed=seed, path=str(path))
        return path

    def together(self, prompts: list[list[int]], steps: list[list[int]]) -> Block:
        """Steps of one token for each of several sequences after their prompts."""
        found = _sum(self.ask("together", prompts=prompts, steps=steps)["steps"])
        found.work *= len(prompts)
        return found

    def history(self, tokens: list[int], threads: int) -> float:
        """Read a long text and keep it; seconds."""
        return float(self.ask("history", tokens=tokens, threads=threads)["seconds"])

    def after(self, start: int, tokens: list[int]) -> Block:
        """Tokens one by one after the kept history of `start`."""
        return _sum(self.ask("after", start=start, tokens=tokens)["steps"])


class TransformersPeer(Peer):
    """transformers on torch in bf16 (`transformers_child.py`), with its defaults, held to one of our ISA levels.

    ValueError for a level that torch cannot be held to. `load` is a PeerError where it was told and did not obey.
    """

    name, module, extra = "transformers", "colibri_lab.bench.transformers_child", "oracle"
    needs = "torch and transformers"

    def __init__(self, python: str | None = None, isa: str | None = None) -> None:
        super().__init__(python, told(isa))
        self._isa = isa

    def load(self, shape: Shape, seed: int, folder: Path, threads: int) -> None:
        """Draw the weights in the child; `folder` is not needed."""
        self.settings = self.ask("load", shape=asdict(shape), seed=seed, threads=threads, isa=self._isa)["settings"]


def start(
    name: str, python: str | None, repack: bool = True, mmap: bool = True, isa: str | None = None
) -> LlamaPeer | TransformersPeer:
    """The peer of that name; transformers held to `isa`. ValueError for another one, and for switches and levels that
    it does not have."""
    if name == LlamaPeer.name:
        return LlamaPeer(python, repack, mmap)
    if name != TransformersPeer.name:
        raise ValueError(f"--peer {name!r} is none of {', '.join(PEERS)}")
    if not (repack and mmap):
        raise ValueError("--no-repack and --no-mmap are llama.cpp's: transformers has no such switches")
    return TransformersPeer(python, isa)


def _sum(steps: list[tuple[float, float, float]]) -> Block:
    total = Block()
    for step in steps:
        total.add(Block(1, *step))
    return total
