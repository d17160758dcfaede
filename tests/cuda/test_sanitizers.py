"""Every kernel under ASan and UBSan, those of one model under TSan, in processes of their own.

Each of the three sees a planted mistake. TSan over all kernels takes minutes and 3 GB, so it is not part of a test run:
python -m tests.cuda.sanitized thread (with libtsan.so in LD_PRELOAD).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_lab.ops import build
from colibri_lab.ops.simulator import SANITIZERS

RUNTIME = {"address": "libasan.so", "thread": "libtsan.so"}
SAID = {"address": "stack-buffer-overflow", "undefined": "runtime error: shift exponent", "thread": "data race"}


def child(top: Path, sanitizer: str, *more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0",
        "TSAN_OPTIONS": "exitcode=66:handle_segv=0:report_bugs=1",
        "PYTHONPATH": str(top),
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if sanitizer in RUNTIME:
        command = [build.compiler(), f"-print-file-name={RUNTIME[sanitizer]}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(found).is_absolute(), f"the compiler has no {RUNTIME[sanitizer]}"
        environment["LD_PRELOAD"] = found
    command = [sys.executable, "-m", "tests.cuda.sanitized", sanitizer, *more]
    return subprocess.run(command, env=environment, cwd=top, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_kernels_are_clean(top: Path, sanitizer: str) -> None:
    ran = child(top, sanitizer, "some" if sanitizer == "thread" else "all")
    assert (ran.returncode, ran.stdout) == (0, "clean\n"), ran.stderr[-3000:]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_planted_mistake_is_seen(top: Path, sanitizer: str) -> None:
    ran = child(top, sanitizer, "mistake")
    assert ran.returncode != 0 and SAID[sanitizer] in ran.stderr, ran.stderr[-3000:]
