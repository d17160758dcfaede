"""a + b * c rounded once on every level, also where plain C has to put it together from doubles."""

from __future__ import annotations

import ctypes
import math
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from colibri_lab.ops import build, isa
from colibri_lab.paths import kernels_dir

from .models import LEVELS

SOURCE = """#include "types.h"
#include "vec.h"
EXPORT void sixteens(const float *a, const float *b, const float *c, float *out, int n) {
    for (int i = 0; i < n; i += 16) v_store(out + i, v_fma(v_load(a + i), v_load(b + i), v_load(c + i)));
}
"""
LARGEST, SMALLEST = np.finfo(np.float32).max, np.float32(2.0**-149)


def rounded(exact: Fraction) -> np.float32:
    """To nearest, ties to even, of a number that is no tie between zeros."""
    if abs(exact) >= Fraction(float(LARGEST)) + Fraction(2) ** 103:
        return np.float32(math.copysign(math.inf, exact))
    with np.errstate(over="ignore"):
        near = np.float32(min(max(float(exact), -float(LARGEST)), float(LARGEST)))
        around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min((x for x in around if np.isfinite(x)),
               key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))  # fmt: skip


def cases() -> np.ndarray:
    """[n, 3] float32: any at all, and products a hair beside half of the last bit of what they are added to."""
    rng = np.random.default_rng(0)
    found = [tuple(rng.integers(0, 2**32, 3, np.uint32).view(np.float32)) for _ in range(3000)]
    found += [tuple(x) for x in rng.standard_normal((3000, 3)).astype(np.float32)]
    for _ in range(3000):
        odd = np.float32(1 + 2.0**-23 * rng.integers(0, 2**23))
        hair = np.float32(2.0**-23 * rng.integers(1, 4))
        exponent = int(rng.integers(-125, 126)) if rng.random() < 0.8 else -126
        b = np.float32(2.0**-24) * (1 + hair) * np.float32(rng.choice([-1, 1]))
        c = (1 - hair if rng.random() < 0.5 else np.float32(1) + hair) * np.float32(2.0**exponent)
        found.append((odd * np.float32(2.0**exponent) * np.float32(rng.choice([-1, 1])), b, c))
    for _ in range(1000):  # sums among the subnormal numbers
        found.append((SMALLEST * np.float32(rng.integers(-9, 10)), np.float32(2.0**-75) * np.float32(rng.normal()),
                      np.float32(2.0**-75) * np.float32(rng.normal())))  # fmt: skip
    found += [(LARGEST, np.float32(2.0**103), np.float32(x)) for x in (0.5, 0.999, 1, 1.001, -1)]
    found += [(np.float32(a), np.float32(b), np.float32(c)) for a in (0.0, -0.0, 1.0, np.inf, -np.inf, np.nan)
              for b in (0.0, -0.0, 2.0, np.inf, np.nan) for c in (0.0, 3.0, -np.inf)]  # fmt: skip
    table = np.array(found, np.float32)
    return np.concatenate([table, np.zeros((-len(table) % 16, 3), np.float32)])


@pytest.mark.parametrize("level", LEVELS)
def test_one_rounding(level: str, tmp_path: Path) -> None:
    library = tmp_path / "fma.so"
    command = [build.compiler(), *build.COMMON, *isa.FLAGS[level], "-shared", "-fPIC", f"-I{kernels_dir() / 'cpu'}",
               "-x", "c", "-", "-o", str(library), "-lm"]  # fmt: skip
    subprocess.run(command, input=SOURCE, text=True, check=True, capture_output=True)
    a, b, c = (np.ascontiguousarray(column) for column in cases().T)
    out = np.empty_like(a)
    at = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c, out)]
    ctypes.CDLL(str(library)).sixteens(*at, len(a))
    twice = 0
    for x, y, z, got in zip(a, b, c, out, strict=True):
        if not np.isfinite([x, y, z]).all():
            with np.errstate(all="ignore"):
                want = x + y * z
            assert (np.isnan(want) and np.isnan(got)) or got == want, (x, y, z)
            continue
        exact = Fraction(float(x)) + Fraction(float(y)) * Fraction(float(z))
        if exact == 0:
            assert got == 0
            continue
        want = rounded(exact)
        assert got == want, (level, x.hex(), y.hex(), z.hex(), got.hex(), want.hex())
        with np.errstate(over="ignore"):
            twice += np.float32(float(x) + float(y) * float(z)) != want
    assert twice > 100, "the sum in double, rounded again, is wrong in these"
