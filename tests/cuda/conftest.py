"""Simulator and NVRTC are for Linux on x86-64: elsewhere the tests of CUDA kernels are no part of a run."""

from __future__ import annotations

import platform
import sys

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    collect_ignore_glob = ["test_*.py"]
