"""Kernels compiled for GPUs on a machine without one: NVRTC with RawModule's options, and what lies in a cubin.

The libraries come with the packages nvidia-cuda-nvrtc and nvidia-cuda-nvdisasm of the extra `test`.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import importlib.metadata
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from colibri_lab.ops.launch import KERNELS, bundle

ARCHITECTURES = ("sm_80", "sm_87", "sm_90")  # A100, Jetson Orin, H100
# What cupy.RawModule(code=text, options=("--fmad=false",), name_expressions=names) gives to NVRTC, less its search
# paths for headers, of which the kernels use none. No fused multiply-add unless written: instances then agree in bits.
OPTIONS = ("--std=c++17", "--fmad=false", "-ftz=true", "--device-as-default-execution-space")


@dataclass(frozen=True)
class Used:
    """What one kernel takes: registers a thread, bytes of stack, spilled bytes, bytes of static shared memory."""

    registers: int
    stack: int
    spilled: int
    shared: int


def _file(package: str, name: str) -> Path:
    files = importlib.metadata.files(package) or []
    found = next((f for f in files if f.name == name), None)
    assert found is not None, f"package {package} has no {name}"
    return Path(str(found.locate()))


@cache
def library() -> c.CDLL:
    c.CDLL(str(_file("nvidia-cuda-nvrtc", "libnvrtc-builtins.so.13.0")))  # it looks for them where none are
    found = c.CDLL(str(_file("nvidia-cuda-nvrtc", "libnvrtc.so.13")))
    found.nvrtcGetErrorString.restype = c.c_char_p
    return found


def _text(program: c.c_void_p, what: str) -> bytes:
    size = c.c_size_t()
    getattr(library(), f"nvrtcGet{what}Size")(program, c.byref(size))
    room = c.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{what}")(program, room)
    return room.raw


def _options(architecture: str) -> tuple[str, ...]:
    return (*OPTIONS, f"-arch={architecture}", "--ptxas-options=-v")


def _entry(file: str, architecture: str) -> Path:
    """The cache's folder of a file's text, instances, options and compiler."""
    versions = [importlib.metadata.version(f"nvidia-cuda-{part}") for part in ("nvrtc", "nvdisasm")]
    parts = (bundle(file), *KERNELS[file], *_options(architecture), *versions)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return Path(os.environ["COLIBRI_CACHE"]) / "nvrtc" / f"{file}-{architecture}-{key}"


def compiled(file: str, architecture: str) -> tuple[bytes, str, dict[str, str]]:
    """(cubin, log with ptxas' figures, lowered name of each instance) of all kernels of a file, cached by content."""
    names, entry = KERNELS[file], _entry(file, architecture)
    if not entry.is_dir():
        cubin, log, lowered = _compile(file, bundle(file), names, _options(architecture))
        entry.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=entry.parent))
        (made / "cubin").write_bytes(cubin)
        (made / "log").write_text(log)
        (made / "names").write_text("\n".join(lowered))
        try:
            made.rename(entry)
        except OSError:  # another process was faster
            assert entry.is_dir()
    lowered = (entry / "names").read_text().split("\n")
    return (entry / "cubin").read_bytes(), (entry / "log").read_text(), dict(zip(names, lowered, strict=True))


def _compile(file: str, text: str, names: tuple[str, ...], options: tuple[str, ...]) -> tuple[bytes, str, list[str]]:
    nvrtc, program = library(), c.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(c.byref(program), text.encode(), f"{file}.cu".encode(), 0, None, None)
    for name in names:
        assert not nvrtc.nvrtcAddNameExpression(program, name.encode())
    given = (c.c_char_p * len(options))(*(o.encode() for o in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = _text(program, "ProgramLog").rstrip(b"\0").decode()
    assert not failed, f"{file}.cu: {nvrtc.nvrtcGetErrorString(failed).decode()}\n{log}"
    lowered = []
    for name in names:
        at = c.c_char_p()
        assert not nvrtc.nvrtcGetLoweredName(program, name.encode(), c.byref(at))
        lowered.append((at.value or b"").decode())
    cubin = _text(program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(c.byref(program))
    return cubin, log, lowered


def used(file: str, architecture: str) -> dict[str, Used]:
    """By instance, from ptxas' own lines."""
    _, log, lowered = compiled(file, architecture)
    made = {}
    for name, symbol in lowered.items():
        said = log.partition(f"Compiling entry function '{symbol}'")[2].partition("Compiling entry function")[0]
        assert "Used" in said, f"{file}: ptxas says nothing of {name}:\n{log[:2000]}"

        def number(pattern: str, body: str = said) -> int:
            found = re.search(pattern, body)
            return int(found[1]) if found else 0

        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        made[name] = Used(
            number(r"Used (\d+) registers"), number(r"(\d+) bytes stack"), spilled, number(r"(\d+) bytes smem")
        )
    return made


def disassembled(file: str, architecture: str) -> str:
    """All kernels of a file as nvdisasm reads them, cached beside the cubin."""
    cubin, _, _ = compiled(file, architecture)
    entry = _entry(file, architecture)
    if not (entry / "sass").exists():
        command = [str(_file("nvidia-cuda-nvdisasm", "nvdisasm")), "-c", str(entry / "cubin")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        made = entry / f"sass-{os.getpid()}"
        made.write_text(text)
        made.rename(entry / "sass")
    assert cubin
    return (entry / "sass").read_text()


@dataclass(frozen=True)
class Loop:
    """Instructions from a label to the jump back to it, and the products of weights among them."""

    begin: int
    end: int
    instructions: int
    products: int


def loops(file: str, name: str, architecture: str) -> list[Loop]:
    """Loops of one kernel that multiply weights, the innermost first. A dp4a is four products, a float one is one."""
    symbol = compiled(file, architecture)[2][name]
    part = disassembled(file, architecture).split(f"\n.text.{symbol}:\n")[1].split("\n\t.section")[0]
    labels, code = dict[str, int](), list[str]()
    for line in part.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif said := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.+?) ;", line):
            code.append(said[1])
    assert code, f"no instructions of {name} in the disassembly"
    found = []
    for at, said in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", said)
        if target and labels.get(target[1], at + 1) <= at:
            body = code[labels[target[1]] : at + 1]
            products = sum(4 if "IDP.4A" in one else 1 if "FFMA" in one or "FMUL" in one else 0 for one in body)
            if products >= 16:
                found.append(Loop(labels[target[1]], at, len(body), products))
    return sorted(found, key=lambda loop: loop.instructions)


def main() -> None:
    """Print registers of every kernel, and instructions a weight of the products with codes."""
    for architecture in ARCHITECTURES:
        for file in KERNELS:
            for name, one in used(file, architecture).items():
                print(f"{architecture}  {name:24s} {one.registers:4d} registers  {one.spilled} bytes spilled")
        for name in (n for n in KERNELS["matmul"] if "Int" in n):
            said = [f"{loop.instructions / loop.products:.2f}" for loop in loops("matmul", name, architecture)]
            print(f"{architecture}  {name:24s} instructions a weight, innermost loop first: {', '.join(said)}")


if __name__ == "__main__":
    os.environ.setdefault("COLIBRI_CACHE", str(Path(__file__).resolve().parents[2] / "build" / "test-cache"))
    main()
