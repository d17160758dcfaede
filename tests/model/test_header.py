"""Safetensors heads.

Odd but legal ones load, wrong ones are refused by name before anything large is allocated (B1).
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from colibri_lab.model.errors import ModelError
from colibri_lab.model.header import Header, parse_header, read_exactly, read_header
from tests.makers import write_raw, write_safetensors

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.uint8)


def opened(path: Path) -> Header:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, path.name)
    finally:
        os.close(fd)


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
@pytest.mark.parametrize("order", [None, ["b", "a"]])
@pytest.mark.parametrize("spaces", [0, 77])
def test_odd_but_legal(tmp_path: Path, metadata: dict[str, str] | None, order: list[str] | None, spaces: int) -> None:
    tensors = {"a": A, "b": B}
    header = opened(write_safetensors(tmp_path / "x", tensors, metadata, header_order=order, spaces=spaces))
    assert header.metadata == (metadata or {})
    data = (tmp_path / "x").read_bytes()
    for name, values in tensors.items():
        found = header.entries[name]
        assert found.shape == values.shape
        assert data[found.begin : found.end] == values.tobytes()


def test_empty_tensors(tmp_path: Path) -> None:
    for shape in ([0], [3, 0], [0, 0, 5]):
        header = opened(
            write_raw(tmp_path / "x", {"e": entry("F32", shape, 0, 0), "b": entry("U8", [4], 0, 4)}, B.tobytes())
        )
        assert header.entries["e"].size == 0
    assert opened(write_raw(tmp_path / "x", {}, b"")).entries == {}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"t": entry("F32", [16, 32], 0, 512)}, 512, r"tensor 't'.*needs 2048 bytes.*has 512"),
        ({"t": entry("F32", [16, 32], 0, 2048)}, 512, r"tensor 't' ends at byte"),
        ({"a": entry("U8", [4], 0, 4), "t": entry("U8", [4], 2, 6)}, 6, r"tensor 't' overlaps"),
        (
            {"a": entry("U8", [4], 0, 4), "t": entry("U8", [4], 6, 10)},
            10,
            r"tensor 't' begins at byte .* 2 bytes after",
        ),
        ({"t": entry("U8", [4], 0, 4)}, 9, r"5 bytes after the last tensor"),
        ({"t": entry("U8", [4], 4, 0)}, 4, r"tensor 't'"),
        ({"t": entry("U8", [-4], 0, 4)}, 4, r"tensor 't' has shape"),
        ({"t": entry("U8", [4.0], 0, 4)}, 4, r"tensor 't' has shape"),
        ({"t": entry("U8", [True], 0, 1)}, 1, r"tensor 't' has shape"),
        ({"t": entry("U8", "4", 0, 4)}, 4, r"tensor 't' has shape"),  # type: ignore[arg-type]
        ({"t": entry("U8", [4], 0, "4")}, 4, r"tensor 't' has data_offsets"),
        ({"t": entry("U8", [4], None, 4)}, 4, r"tensor 't' has data_offsets"),
        ({"t": entry("X9", [4], 0, 4)}, 4, r"tensor 't' has dtype 'X9'"),
        ({"t": entry("F4", [3], 0, 1)}, 1, r"tensor 't'"),
        ({"t": entry("F32", [1 << 60, 1 << 60], 0, 4)}, 4, r"tensor 't'.*needs"),
        ({"t": entry("U8", [1] * 99, 0, 1)}, 1, r"tensor 't' has shape"),
        ({"t": [1, 2]}, 0, r"tensor 't' is not described"),
        ({"t": {}}, 0, r"tensor 't' has dtype None"),
        ({"__metadata__": {"a": 1}}, 0, r"__metadata__"),
        ({"__metadata__": []}, 0, r"__metadata__"),
        (b'{"a":1,"a":2}', 0, r"names 'a' twice"),
        (b'{"t":NaN}', 0, r"holds NaN"),
        (b"[1]", 0, r"not a JSON object"),
        (b"{]", 0, r"not JSON"),
        (b'{"\xff":1}', 0, r"not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, r"not JSON"),
        (b'{"a":' + b"[" * 40000 + b"]" * 40000 + b"}", 0, r"nested"),
        (b"", 0, r"not believable"),
    ],
)
def test_illegal(tmp_path: Path, header: Any, data: int, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        opened(write_raw(tmp_path / "bad.safetensors", header, bytes(data)))
    assert str(caught.value).startswith("bad.safetensors: ")
    assert "\n" not in str(caught.value)


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    """Under a limit on address space: the claim alone must allocate nothing."""
    for length in (1 << 62, 200 << 30, 100):
        write_raw(tmp_path / f"x{length}", b"{}", length=length)
    code = (
        "import os, resource, sys\n"
        "from colibri_lab.model.header import read_header\n"
        "from colibri_lab.model.errors import ModelError\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        read_header(os.open(name, os.O_RDONLY), 'x')\n"
        "    except ModelError as error:\n        assert 'header claims' in str(error)\n"
        "    else:\n        sys.exit(1)\n"
    )
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=60)


def test_short_files(tmp_path: Path) -> None:
    whole = write_safetensors(tmp_path / "x", {"a": A, "b": B}).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:size])
        with pytest.raises(ModelError):
            opened(tmp_path / "x")


def test_file_cut_while_open(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x", {"a": A})
    fd = os.open(path, os.O_RDONLY)
    try:
        found = read_header(fd, "x").entries["a"]
        os.truncate(path, found.begin + 5)
        with pytest.raises(ModelError, match="19 bytes too early"):
            read_exactly(fd, found.begin, found.size, "x")
    finally:
        os.close(fd)


DTYPES = st.sampled_from(["U8", "F16", "BF16", "F32", "I64", "F8_E4M3", "F4", "X"])
WHOLE = st.integers(-1, 9) | st.sampled_from([1 << 31, 1 << 63, (1 << 64) - 1])
ENTRY = st.fixed_dictionaries(
    {"dtype": DTYPES, "shape": st.lists(WHOLE, max_size=3), "data_offsets": st.lists(WHOLE, max_size=3)}
)


def judge(path: Path, data: bytes) -> None:
    """Ours refuses, or reads exactly what the safetensors library reads."""
    path.write_bytes(data)
    try:
        header = opened(path)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    try:
        with safe_open(path, "np") as official:
            assert set(official.keys()) == set(header.entries)
            for name, found in header.entries.items():
                assert tuple(official.get_slice(name).get_shape()) == found.shape
                assert 0 <= found.begin <= found.end <= len(data)
    except SafetensorError as error:  # ours may take an odd file only if the library has the same bytes for it
        pytest.fail(f"the library refuses what we took: {error}")


@settings(max_examples=200, deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=3), ENTRY, max_size=3), size=st.integers(0, 12), spaces=st.integers(0, 3)
)
def test_any_header(tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int, spaces: int) -> None:
    text = json.dumps(header).encode() + b" " * spaces
    judge(tmp_path_factory.getbasetemp() / "any", struct.pack("<Q", len(text)) + text + bytes(size))


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int) -> None:
    base = tmp_path_factory.getbasetemp()
    data = bytearray(
        write_safetensors(base / "good", {"a": A, "b": B, "c": A.astype(np.float16)}, {"k": "v"}).read_bytes()
    )
    data[at % len(data)] = byte
    judge(base / "any", bytes(data[: len(data) - cut]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    judge(tmp_path_factory.getbasetemp() / "any", data)


def test_many_tensors_are_parsed_in_linear_time() -> None:
    header = {f"layers.{i}.experts.{i}": entry("U8", [1], i, i + 1) for i in range(20_000)}
    text = json.dumps(header).encode()
    assert len(parse_header(text, 8 + len(text) + 20_000, "x").entries) == 20_000
