"""The rules for kernel text that a reader would not see broken: kernels/README.md says why each is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# rule -> what a line of a .cu file or of a shared header must not have
RULES = {
    "includes only its own headers": r'#\s*include\s+(?!"(common|tiles|choose|clb)\.cuh")',
    "no inline assembly outside device/": r"\basm\b",
    "shared memory comes from clb_shared alone": r"__shared__",
    "lanes of a shuffle are named": r"__(shfl|ballot|any|all|reduce|match)\w*(?<!_sync)\(|__shfl(_up|_down|_xor)?\(",
    "integers have a width": r"\b(long|short|unsigned|size_t|int\d+_t|uint\d+_t|char)\b",
    "no fast approximations": r"__(expf|logf|fdividef|powf|sinf|cosf|frcp_\w+|fsqrt_\w+)\b",
    "no atomics on floats": r"\batomicAdd\b",
    "no printf, assert, malloc, new": r"\b(printf|assert|malloc|new)\b\s*\(?",
    "no global state": r"^\s*(static|__device__|__constant__)\s+(?!__forceinline__)\w+\s+\w+\s*(=|\[|;)",
    "at most 120 characters": r"^.{121,}",
}
MOST_LINES = 300


def kernel_texts(top: Path) -> list[Path]:
    """What is shared by GPU and simulator."""
    return sorted(path for path in (top / "kernels/cuda").glob("*.cu*") if path.is_file())


def broken(text: str) -> list[str]:
    """`line: rule` for each line that breaks one; comments do not count, but for their length."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0]
        for rule, pattern in RULES.items():
            if re.search(pattern, line if "characters" in rule else code):
                found.append(f"{number}: {rule}: {line.strip()}")
    return found


def test_kernels_keep_the_rules(top: Path) -> None:
    texts = kernel_texts(top)
    assert len(texts) > 10
    for path in texts:
        assert not broken(path.read_text()), path.name


def test_files_are_short(top: Path) -> None:
    for path in [*kernel_texts(top), *(top / "kernels/cuda").glob("*/*.cuh")]:
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_LINES and max(map(len, lines)) <= 120, path.name


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda_fp16.h>",
        '#include "other.cuh"',
        'asm("mov.u32 %0, 1;");',
        "__shared__ float room[4];",
        "v += __shfl_xor(v, 1);",
        "if (__any(p)) return;",
        "unsigned n = 0;",
        "size_t n = 0;",
        "v = __expf(v);",
        "atomicAdd(sum, v);",
        'printf("%d", n);',
        "__device__ int counter = 0;",
        "x" * 121,
    ],
)
def test_each_rule_sees_its_breach(line: str) -> None:
    assert len(broken(line)) == 1


@pytest.mark.parametrize(
    "line",
    ['#include "common.cuh"', "if (__any_sync(kAll, p)) return;", "// unsigned, as in CUDA", "const u32 n = 0;"],
)
def test_right_lines_pass(line: str) -> None:
    assert not broken(line)
